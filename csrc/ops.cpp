// CPU kernels of the zinf:: ops that move bytes (schemas and fakes: runtime/ops.py). The only file that includes torch.
//
// Working copies. `gather` (and `reload`, the same) makes a copy of a block and keeps a reference to it ("held") until
// `release`; `prefetch` starts the read early ("reading"). Both tables are keyed by the block's address. A copy whose block
// has been written since is never returned: whoever writes a block calls zinf_block_invalidate, or zinf_held_arm has
// write-protected it. Tensors are never destroyed while `mutex` is held: freeing memory may free a block and come back here.
#define TORCH_TARGET_VERSION 0x020b000000000000  // the stable interface of torch 2.11; only here: it hides c10's headers
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <optional>
#include <pthread.h>
#include <stdexcept>
#include <unordered_map>
#include <vector>

#include "cpu_allocator.h"
#include "engine.h"

namespace {
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

constexpr int64_t kTile = 4 << 20;  // bytes of one staging buffer of accumulate

[[noreturn]] void raise_last() { throw std::runtime_error(std::string("zinf: ") + zinf_last_error()); }
int64_t checked(int64_t result) { return result < 0 ? (raise_last(), -1) : result; }

// Bytes from the first to the last element, both included.
int64_t span_bytes(const Tensor& t) {
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); ++d) {
    if (t.size(d) == 0) return 0;
    last += (t.size(d) - 1) * t.stride(d);
  }
  return (last + 1) * static_cast<int64_t>(t.element_size());
}

// Every byte of the span belongs to exactly one element.
bool is_dense(const Tensor& t) { return span_bytes(t) == t.numel() * static_cast<int64_t>(t.element_size()); }

bool same_geometry(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.dim() == b.dim() && std::equal(a.sizes().begin(), a.sizes().end(), b.sizes().begin()) &&
         std::equal(a.strides().begin(), a.strides().end(), b.strides().begin());
}

int32_t raw_dtype(const Tensor& t) {
  int32_t dtype = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
  return dtype;
}

// New memory from torch's CPU allocator with the sizes, strides and dtype of `t`.
Tensor empty_as(const Tensor& t) {
  AtenTensorHandle made = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(t.dim(), t.sizes().data(), t.strides().data(), raw_dtype(t),
                                                         aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}

// Another tensor over the same storage: keeps the memory alive without keeping a Python object alive.
Tensor* new_alias(const Tensor& t) {
  AtenTensorHandle made = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch__reinterpret_tensor(t.get(), t.dim(), t.sizes().data(), t.strides().data(), t.storage_offset(), &made));
  return new Tensor(made);
}

void drop_alias(void* context) { delete static_cast<Tensor*>(context); }

struct Copy {
  Tensor tensor;
  int64_t ticket = 0;  // of its read
  bool armed = false;  // the block is write-protected: valid as long as it isn't dirty
};

// The engine's working copies; one for the process, since blocks are (their addresses are unique).
struct Copies {
  std::mutex mutex;
  std::unordered_map<void*, Copy> held, reading;      // by address of the block
  std::unordered_map<void*, void*> block_of;          // address of a held copy -> its block
  std::vector<Copy> abandoned;                        // reads whose result nobody wants; memory must wait for the disk

  static void lock_for_fork() { all().mutex.lock(); }
  static void unlock_in_parent() { all().mutex.unlock(); }
  static void unlock_in_child() {  // the parent's reads never arrive here
    auto& copies = all();
    for (auto& [block, copy] : copies.reading) copies.abandoned.push_back(std::move(copy));
    new std::vector<Copy>(std::move(copies.abandoned));  // left alone: nothing may be freed inside of a fork
    copies.reading.clear();
    copies.abandoned.clear();
    copies.mutex.unlock();
  }

  static Copies& all() {
    static auto* one = new Copies;
    return *one;
  }

  // The members below are called with the mutex held and hand what must be destroyed to `trash`.
  void forget_held(void* block, std::vector<Copy>& trash) {
    auto it = held.find(block);
    if (it == held.end()) return;
    block_of.erase(it->second.tensor.data_ptr());
    trash.push_back(std::move(it->second));
    held.erase(it);
  }

  void forget(void* block, std::vector<Copy>& trash) {
    forget_held(block, trash);
    auto it = reading.find(block);
    if (it != reading.end()) {
      abandoned.push_back(std::move(it->second));
      reading.erase(it);
    }
    sweep(trash);
  }

  void sweep(std::vector<Copy>& trash) {
    for (size_t i = 0; i < abandoned.size();) {
      if (!zinf_poll(abandoned[i].ticket)) {
        ++i;
        continue;
      }
      trash.push_back(std::move(abandoned[i]));
      abandoned.erase(abandoned.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
};

void on_block_free(void* block) {
  zinf_ahead_drop(block);
  std::vector<Copy> trash;
  std::lock_guard<std::mutex> lock(Copies::all().mutex);
  Copies::all().forget(block, trash);
}

// The address of the block that `t` lives in from its first byte, or null: then `t` computes in place.
void* block_of_tensor(const Tensor& t) {
  if (t.numel() == 0) return nullptr;
  void* address = t.data_ptr();
  int64_t nbytes = zinf_block_bytes(address);
  return nbytes >= 0 && span_bytes(t) <= nbytes ? address : nullptr;
}

// Finds a usable copy of the block or starts to read one. `wait_for`: the ticket to wait for, 0 if the copy is complete.
Tensor find_or_read(void* block, const Tensor& t, int64_t* wait_for) {
  auto& copies = Copies::all();
  std::vector<Copy> trash;
  {
    std::lock_guard<std::mutex> lock(copies.mutex);
    copies.sweep(trash);
    auto it = copies.held.find(block);
    if (it != copies.held.end() && it->second.armed && zinf_block_dirty(block)) {
      copies.forget_held(block, trash);
      it = copies.held.end();
    }
    if (it != copies.held.end() && same_geometry(it->second.tensor, t)) {
      *wait_for = 0;
      return it->second.tensor;
    }
    if (it != copies.held.end()) copies.forget_held(block, trash);  // another view of the block: its copy replaces the old
    auto in_flight = copies.reading.find(block);
    if (in_flight != copies.reading.end()) {
      if (same_geometry(in_flight->second.tensor, t)) {
        *wait_for = in_flight->second.ticket;
        return in_flight->second.tensor;
      }
      copies.abandoned.push_back(std::move(in_flight->second));
      copies.reading.erase(in_flight);
    }
  }
  trash.clear();
  Tensor made = empty_as(t);
  int64_t ticket = checked(zinf_read(block, 0, made.data_ptr(), span_bytes(t)));
  std::lock_guard<std::mutex> lock(copies.mutex);
  auto [it, added] = copies.reading.insert({block, Copy{made, ticket}});
  if (!added) {  // another thread was faster
    copies.abandoned.push_back(Copy{made, ticket});
    *wait_for = it->second.ticket;
    return it->second.tensor;
  }
  *wait_for = ticket;
  return made;
}

// keep: the engine holds a reference until `release`.
Tensor complete_copy(const Tensor& master, bool keep) {
  void* block = block_of_tensor(master);
  if (!block) return master;
  int64_t ticket = 0;
  Tensor copy = find_or_read(block, master, &ticket);
  if (ticket == 0) return copy;
  auto& copies = Copies::all();
  int failed = zinf_wait(ticket);
  std::string why = failed ? zinf_last_error() : "";
  std::vector<Copy> trash;
  std::lock_guard<std::mutex> lock(copies.mutex);
  auto it = copies.reading.find(block);
  bool ours = it != copies.reading.end() && it->second.ticket == ticket;
  if (failed) {
    if (ours && zinf_poll(ticket)) {  // interrupted: the disk still writes into the buffer, so it stays in the table
      trash.push_back(std::move(it->second));
      copies.reading.erase(it);
    }
    throw std::runtime_error("zinf: " + why);
  }
  if (ours) {
    if (keep) {
      copies.block_of[copy.data_ptr()] = block;
      copies.held.insert_or_assign(block, std::move(it->second));
    } else {
      trash.push_back(std::move(it->second));
    }
    copies.reading.erase(it);
  }
  return copy;
}

Tensor gather(const Tensor& master, int64_t) { return complete_copy(master, true); }

// An activation comes back for its readers in one graph: its copy lives as long as their value does.
Tensor reload(const Tensor& saved, int64_t) { return complete_copy(saved, false); }

void prefetch(const Tensor& master) {
  int64_t ticket = 0;
  if (void* block = block_of_tensor(master)) find_or_read(block, master, &ticket);
}

void read_ahead(const Tensor& master) {
  if (master.numel() > 0) zinf_ahead_start(master.data_ptr());
}

void release(const Tensor& copy) {
  if (copy.numel() == 0) return;
  auto& copies = Copies::all();
  std::vector<Copy> trash;
  std::lock_guard<std::mutex> lock(copies.mutex);
  auto it = copies.block_of.find(copy.data_ptr());
  if (it != copies.block_of.end()) copies.forget_held(it->second, trash);
}

void free_block(void* address) { zinf_block_free(address); }

// A tensor over a new block of `store`; the block goes when the storage goes.
Tensor over_new_block(int64_t store, int64_t nbytes, Sizes sizes, Sizes strides, int32_t dtype) {
  void* block = zinf_block_new(store, nbytes);
  if (!block) raise_last();
  AtenTensorHandle made = nullptr;
  auto deleter = [](void* data, void*) { free_block(data); };
  auto rc = torch_from_blob(block, static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), 0, dtype, aoti_torch_device_type_cpu(), -1,
                            &made, aoti_torch_layout_strided(), nullptr, 0, deleter, nullptr);
  if (rc != 0) zinf_block_free(block);
  STABLE_TORCH_ERROR_CODE_CHECK(rc);
  return Tensor(made);
}

Tensor empty_contiguous(Sizes sizes, Sizes strides, int32_t dtype) {
  AtenTensorHandle made = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype, aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}

Tensor block_tensor(int64_t store, std::vector<int64_t> size, ScalarType type) {
  std::vector<int64_t> strides(size.size());
  int64_t numel = 1, stride = 1;
  for (size_t d = size.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<int64_t>(size[d], 1);
    numel *= size[d];
  }
  auto dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  if (numel == 0) return empty_contiguous(size, strides, dtype);
  return over_new_block(store, numel * static_cast<int64_t>(aoti_torch_dtype_element_size(dtype)), size, strides, dtype);
}

Tensor store_copy(const Tensor& x, int64_t store) {
  if (x.numel() == 0) return torch::stable::clone(x);
  Tensor source = is_dense(x) ? x : torch::stable::contiguous(x);
  int64_t nbytes = span_bytes(source);
  Tensor saved = over_new_block(store, nbytes, source.sizes(), source.strides(), raw_dtype(source));
  Tensor* alive = new_alias(source);
  if (zinf_write(saved.data_ptr(), 0, source.data_ptr(), nbytes, drop_alias, alive) < 0) {
    std::string why = zinf_last_error();
    delete alive;
    throw std::runtime_error("zinf: " + why);
  }
  return saved;
}

std::atomic<int64_t> current_store{0};

Tensor offload(const Tensor& x) {
  int64_t store = current_store;
  if (store == 0) throw std::runtime_error("zinf: offload: no store is set (zinf_set_current_store)");
  return x.numel() == 0 || !is_dense(x) ? x : store_copy(x, store);
}

template <class T, class Wide>
void add_into(void* into, const void* from, int64_t count) {
  T* a = static_cast<T*>(into);
  const T* b = static_cast<const T*>(from);
  for (int64_t i = 0; i < count; ++i) a[i] = static_cast<T>(static_cast<Wide>(a[i]) + static_cast<Wide>(b[i]));
}

using Adder = void (*)(void*, const void*, int64_t bytes);

// into += from, rounded as torch's add_ rounds.
Adder adder_of(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
    case ScalarType::ComplexFloat: return [](void* a, const void* b, int64_t n) { add_into<float, float>(a, b, n / 4); };
    case ScalarType::Double:
    case ScalarType::ComplexDouble: return [](void* a, const void* b, int64_t n) { add_into<double, double>(a, b, n / 8); };
    case ScalarType::BFloat16: return [](void* a, const void* b, int64_t n) { add_into<torch::headeronly::BFloat16, float>(a, b, n / 2); };
    case ScalarType::Half: return [](void* a, const void* b, int64_t n) { add_into<torch::headeronly::Half, float>(a, b, n / 2); };
    default: throw std::runtime_error("zinf: accumulate: gradients are floating-point or complex (float32, float64, bfloat16, float16)");
  }
}

// home += grad, tile by tile through the disk: two tiles of memory beside what the write window allows.
void accumulate_block(void* block, int64_t nbytes, const char* grad, Adder add, const Tensor& like) {
  auto new_tile = [&](int64_t begin) {
    int64_t one[1] = {(std::min(kTile, nbytes - begin) + static_cast<int64_t>(like.element_size()) - 1) / static_cast<int64_t>(like.element_size())};
    int64_t stride[1] = {1};
    return empty_contiguous(Sizes(one, 1), Sizes(stride, 1), raw_dtype(like));
  };
  struct Pending {  // a tile being read; never freed before the disk is done with it
    std::optional<Tensor> tile;
    int64_t ticket = 0;
    ~Pending() {
      if (tile && ticket > 0) zinf_wait_quiet(ticket);
    }
  };
  auto start = [&](Pending& p, int64_t begin) {
    p.tile = new_tile(begin);
    p.ticket = checked(zinf_read(block, begin, p.tile->data_ptr(), std::min(kTile, nbytes - begin)));
  };
  Pending now, next;
  start(now, 0);
  for (int64_t begin = 0; begin < nbytes; begin += kTile) {
    int64_t length = std::min(kTile, nbytes - begin);
    if (begin + kTile < nbytes) start(next, begin + kTile);
    checked(zinf_wait(now.ticket));
    add(now.tile->data_ptr(), grad + begin, length);
    auto* alive = new Tensor(std::move(*now.tile));
    now.tile.reset();
    if (zinf_write(block, begin, alive->data_ptr(), length, drop_alias, alive) < 0) {
      std::string why = zinf_last_error();
      delete alive;
      throw std::runtime_error("zinf: " + why);
    }
    std::swap(now.tile, next.tile);
    std::swap(now.ticket, next.ticket);
  }
}

void accumulate(const Tensor& home, const Tensor& grad) {
  if (home.numel() == 0) return;
  if (home.numel() != grad.numel()) throw std::runtime_error("zinf: accumulate: the gradient and its home differ in size");
  if (!is_dense(home)) throw std::runtime_error("zinf: accumulate: the gradient's home must be dense");
  Tensor source = grad;
  if (!same_geometry(home, grad)) {
    source = empty_as(home);
    torch::stable::copy_(source, grad);
  }
  Adder add = adder_of(home.scalar_type());
  void* block = block_of_tensor(home);
  if (!block) return add(home.data_ptr(), source.data_ptr(), span_bytes(home));
  zinf_block_invalidate(block);
  accumulate_block(block, span_bytes(home), static_cast<const char*>(source.data_ptr()), add, home);
}

[[maybe_unused]] const bool hooks_installed = [] {
  // Before a fork handlers run in reverse order: ours (the table), then the engine's, which waits for threads that may be
  // freeing a tensor, then the allocator's.
  zinf_alloc_fork_handlers();
  (void)zinf::engine();
  zinf::ahead_fork_handlers();
  pthread_atfork(Copies::lock_for_fork, Copies::unlock_in_parent, Copies::unlock_in_child);
  zinf_set_block_free_hook(on_block_free);
  return true;
}();

}  // namespace

extern "C" {
void zinf_set_current_store(int64_t store) { current_store = store; }

int64_t zinf_held_count(void) {
  std::lock_guard<std::mutex> lock(Copies::all().mutex);
  return static_cast<int64_t>(Copies::all().held.size());
}

int64_t zinf_held_bytes(void) {
  std::lock_guard<std::mutex> lock(Copies::all().mutex);
  int64_t total = 0;
  for (auto* table : {&Copies::all().held, &Copies::all().reading})
    for (auto& [block, copy] : *table) total += span_bytes(copy.tensor);
  return total;
}

int64_t zinf_prefetch_count(void) {
  std::lock_guard<std::mutex> lock(Copies::all().mutex);
  return static_cast<int64_t>(Copies::all().reading.size());
}

void zinf_block_invalidate(void* block) { on_block_free(block); }

void zinf_prefetch_cancel_all(void) {
  std::vector<Copy> trash;
  {
    auto& copies = Copies::all();
    std::lock_guard<std::mutex> lock(copies.mutex);
    for (auto& [block, copy] : copies.reading) trash.push_back(std::move(copy));
    for (auto& copy : copies.abandoned) trash.push_back(std::move(copy));
    copies.reading.clear();
    copies.abandoned.clear();
  }
  for (auto& copy : trash) zinf_wait_quiet(copy.ticket);
}

void zinf_held_forget_all(void) {
  zinf_prefetch_cancel_all();
  std::unordered_map<void*, Copy> trash;
  std::lock_guard<std::mutex> lock(Copies::all().mutex);
  trash.swap(Copies::all().held);
  Copies::all().block_of.clear();
}

int zinf_held_arm(void) {
  std::lock_guard<std::mutex> lock(Copies::all().mutex);
  for (auto& [block, copy] : Copies::all().held) {
    if (copy.armed) continue;
    if (zinf_block_protect(block) != 0) return -1;
    copy.armed = true;
  }
  return 0;
}
}

STABLE_TORCH_LIBRARY_IMPL(zinf, CPU, m) {
  m.impl("prefetch", TORCH_BOX(&prefetch));
  m.impl("read_ahead", TORCH_BOX(&read_ahead));
  m.impl("gather", TORCH_BOX(&gather));
  m.impl("release", TORCH_BOX(&release));
  m.impl("offload", TORCH_BOX(&offload));
  m.impl("reload", TORCH_BOX(&reload));
  m.impl("store_copy", TORCH_BOX(&store_copy));
  m.impl("accumulate", TORCH_BOX(&accumulate));
}

STABLE_TORCH_LIBRARY_IMPL(zinf, CompositeExplicitAutograd, m) { m.impl("block_tensor", TORCH_BOX(&block_tensor)); }
