// Where the operations of one stream run.
#pragma once

#include <boost/context/detail/fcontext.hpp>

#include "sim/sanitizer.h"
#include "sim/worker_memory.h"

namespace sim {

#if defined(__SANITIZE_THREAD__)

/// A TSan context with a stack of its own: on the stack of the OS thread that serves the stream, frames of
/// different contexts would follow one another at the same addresses, and be reported as racing.
class OperationFiber {
 public:
  OperationFiber()
      : stack_(allocate_stack(kBytes)),
        tsan_(tsan_create_fiber()),
        context_(boost::context::detail::make_fcontext(stack_.top(), kBytes, &OperationFiber::main)) {}
  ~OperationFiber() {
    tsan_destroy_fiber(tsan_);
    free_stack(stack_);
  }
  OperationFiber(const OperationFiber&) = delete;
  OperationFiber& operator=(const OperationFiber&) = delete;

  SIM_INVISIBLE void run(void (*function)(void*), void* argument) {
    function_ = function;
    argument_ = argument;
    server_ = tsan_current_fiber();
    tsan_switch_to(tsan_);
    context_ = boost::context::detail::jump_fcontext(context_, this).fctx;
  }

 private:
  static constexpr size_t kBytes = size_t{8} << 20;  // BLAS and MPI run here too

  SIM_INVISIBLE static void main(boost::context::detail::transfer_t from) {
    auto* self = static_cast<OperationFiber*>(from.data);
    for (;;) {
      self->function_(self->argument_);
      tsan_switch_to(self->server_);
      from = boost::context::detail::jump_fcontext(from.fctx, nullptr);
    }
  }

  StackBounds stack_;
  void* tsan_ = nullptr;
  void* server_ = nullptr;
  boost::context::detail::fcontext_t context_ = nullptr;
  void (*function_)(void*) = nullptr;
  void* argument_ = nullptr;
};

#else

class OperationFiber {
 public:
  void run(void (*function)(void*), void* argument) { function(argument); }
};

#endif

}  // namespace sim
