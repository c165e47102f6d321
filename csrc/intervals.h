// Two ordered structures over [0, size): which parts are free to hand out, and which parts hold pages.
#pragma once
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <set>
#include <utility>

namespace zinf::alloc {

// Free ranges, coalesced; best fit, lowest offset among equals, so the same calls give the same offsets.
class FreeRanges {
 public:
  explicit FreeRanges(int64_t size) { insert(0, size); }

  int64_t take(int64_t nbytes) {  // offset, or -1
    auto it = by_size_.lower_bound({nbytes, 0});
    if (it == by_size_.end()) return -1;
    auto [length, offset] = *it;
    erase(offset, length);
    if (length > nbytes) insert(offset + nbytes, length - nbytes);
    return offset;
  }

  bool take_at(int64_t offset, int64_t nbytes) {  // false: some byte of it is taken
    auto it = by_offset_.upper_bound(offset);
    if (it == by_offset_.begin()) return false;
    auto [start, length] = *std::prev(it);
    if (start + length < offset + nbytes) return false;
    erase(start, length);
    if (offset > start) insert(start, offset - start);
    if (start + length > offset + nbytes) insert(offset + nbytes, start + length - offset - nbytes);
    return true;
  }

  void give(int64_t offset, int64_t nbytes) {
    auto after = by_offset_.lower_bound(offset);
    if (after != by_offset_.begin()) {
      auto [start, length] = *std::prev(after);
      if (start + length == offset) { erase(start, length); offset = start; nbytes += length; }
    }
    after = by_offset_.lower_bound(offset);
    if (after != by_offset_.end() && after->first == offset + nbytes) {
      int64_t length = after->second;
      erase(offset + nbytes, length);
      nbytes += length;
    }
    insert(offset, nbytes);
  }

  template <class F> void each(F f) const {  // f(begin, end)
    for (auto [offset, length] : by_offset_) f(offset, offset + length);
  }

 private:
  void insert(int64_t offset, int64_t length) { by_offset_[offset] = length; by_size_.insert({length, offset}); }
  void erase(int64_t offset, int64_t length) { by_offset_.erase(offset); by_size_.erase({length, offset}); }
  std::map<int64_t, int64_t> by_offset_;            // offset -> length
  std::set<std::pair<int64_t, int64_t>> by_size_;   // (length, offset)
};

// A set of bytes as disjoint, coalesced intervals [begin, end).
class Intervals {
 public:
  template <class F> void parts(int64_t begin, int64_t end, F f) const {  // f(a, b): the parts of [begin, end) in it
    auto it = map_.upper_bound(begin);
    if (it != map_.begin()) --it;
    for (; it != map_.end() && it->first < end; ++it) {
      int64_t a = std::max(begin, it->first), b = std::min(end, it->second);
      if (a < b) f(a, b);
    }
  }

  template <class F> void gaps(int64_t begin, int64_t end, F f) const {  // f(a, b): the parts not in it
    int64_t at = begin;
    parts(begin, end, [&](int64_t a, int64_t b) { if (a > at) f(at, a); at = b; });
    if (at < end) f(at, end);
  }

  int64_t covered(int64_t begin, int64_t end) const {
    int64_t sum = 0;
    parts(begin, end, [&](int64_t a, int64_t b) { sum += b - a; });
    return sum;
  }

  void add(int64_t begin, int64_t end) {
    auto it = map_.upper_bound(begin);
    if (it != map_.begin() && std::prev(it)->second >= begin) {
      --it;
      if (it->second >= end) return;
    }
    while (it != map_.end() && it->first <= end) {
      begin = std::min(begin, it->first);
      end = std::max(end, it->second);
      it = map_.erase(it);
    }
    map_.emplace_hint(it, begin, end);
  }

  void remove(int64_t begin, int64_t end) {
    auto it = map_.upper_bound(begin);
    if (it != map_.begin() && std::prev(it)->second > begin) --it;
    while (it != map_.end() && it->first < end) {
      auto [a, b] = *it;
      it = map_.erase(it);
      if (a < begin) map_[a] = begin;
      if (b > end) map_[end] = b;
    }
  }

 private:
  std::map<int64_t, int64_t> map_;  // begin -> end
};

}  // namespace zinf::alloc
