// What the CPU itself faults on while a kernel runs: division by zero or out of range, memory that is not there, a stack
// that is full. Each ends the launch with a finding; without this, the process.
#include <csignal>

#include "core.h"

namespace emu {
namespace {

constexpr int kSignals[] = {SIGFPE, SIGSEGV, SIGBUS};
struct sigaction before[3];
char handler_stack[64 * 1024];                   // a full fiber stack has no room for a handler
stack_t stack_before;

// The place is one past the instruction, as that of a call is.
Site faulting_site(void *context) {
  const auto &registers = static_cast<ucontext_t *>(context)->uc_mcontext.gregs;
  return site_of(reinterpret_cast<void *>(registers[REG_RIP] + 1));
}

bool on_a_stack(uintptr_t address) { return address - uintptr_t(stacks) < stacks_bytes; }

// Runs on its own stack and does not return: the fiber that faulted is left where it is.
void handle(int signal, siginfo_t *info, void *context) {
  if (!current) {                                // not the kernel's fault
    restore_signals();
    return;
  }
  const Site site = faulting_site(context);
  if (signal == SIGFPE) stop(Kind::misuse, site, "integer division by zero, or out of range");
  if (on_a_stack(uintptr_t(info->si_addr)))
    stop(Kind::misuse, site, "local arrays of more than %zu bytes in a thread", kStack);
  stop(Kind::out_of_bounds, site, "access of memory that is not there, at %s", address_name(info->si_addr).c_str());
}

}  // namespace

void catch_signals() {
  stack_t stack{};
  stack.ss_sp = handler_stack;
  stack.ss_size = sizeof handler_stack;
  sigaltstack(&stack, &stack_before);
  struct sigaction action{};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int i = 0; i < 3; i++) sigaction(kSignals[i], &action, &before[i]);
}

void restore_signals() {
  for (int i = 0; i < 3; i++) sigaction(kSignals[i], &before[i], nullptr);
  sigaltstack(&stack_before, nullptr);
}

}  // namespace emu
