// Vector clocks: what each agent has seen of every other one.
#include "runtime.h"

namespace emu {

void join(Clock *into, const Clock *from) {
  for (int i = 0; i < block.agents; i++) into[i] = into[i] > from[i] ? into[i] : from[i];
}

void Sync::reset() {
  clocks.assign(block.agents, 0);
  fenced.assign(block.agents, 0);
}

void Sync::release(int thread) {
  join(clocks.data(), clocks_of(thread));
  if (block.has_async_proxy) join(fenced.data(), fenced_of(thread));
  tick(thread);
}

void Sync::acquire(int thread) const {
  join(clocks_of(thread), clocks.data());
  if (block.has_async_proxy) join(fenced_of(thread), fenced.data());
}

}  // namespace emu
