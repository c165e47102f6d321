// Lets a wait inside the engine see Ctrl-C: about every 50 ms Python's pending signal handlers are run. What a handler
// raises ends the wait and is kept for the caller. A Python callback could not do this: handlers run at its first
// instruction, before any `try` of its own. Python's functions come as pointers; nothing links against Python.
#include <mutex>

#include "engine.h"

namespace {

struct Python {
  int (*gil_ensure)();
  void (*gil_release)(int);
  int (*check_signals)();
  void (*fetch)(void**, void**, void**);
  void (*normalize)(void**, void**, void**);
  void (*decref)(void*);
};

Python python;
void* raised = nullptr;  // an exception that a handler raised; a reference of ours. Guarded by the GIL

int check_signals() {
  int state = python.gil_ensure();
  int result = python.check_signals();
  if (result != 0) {
    void *type = nullptr, *value = nullptr, *traceback = nullptr;
    python.fetch(&type, &value, &traceback);
    python.normalize(&type, &value, &traceback);
    for (void* reference : {type, traceback, raised})
      if (reference) python.decref(reference);
    raised = value;
  }
  python.gil_release(state);
  return result != 0;
}

}  // namespace

extern "C" {
// The addresses of PyGILState_Ensure, PyGILState_Release, PyErr_CheckSignals, PyErr_Fetch, PyErr_NormalizeException, Py_DecRef.
void zinf_python_signals(void* const functions[6]) {
  python = {reinterpret_cast<int (*)()>(functions[0]),
            reinterpret_cast<void (*)(int)>(functions[1]),
            reinterpret_cast<int (*)()>(functions[2]),
            reinterpret_cast<void (*)(void**, void**, void**)>(functions[3]),
            reinterpret_cast<void (*)(void**, void**, void**)>(functions[4]),
            reinterpret_cast<void (*)(void*)>(functions[5])};
  zinf_set_interrupt_check(check_signals);
}

// The exception (a new reference, for a caller that holds the GIL), or null.
void* zinf_python_raised(void) {
  void* value = raised;
  raised = nullptr;
  return value;
}
}
