// Threads of a threadgroup as fibers of one thread: each runs until it waits for others.
//
// Simdgroups run one after the other, each until all of its lanes wait at a barrier of the threadgroup; lanes
// likewise between the points where a simdgroup meets. Lanes ascend, or descend where `reversed` is set: what
// is right in both orders and wrong without a barrier needs that barrier.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

extern "C" {
int reversed = 0;  // the order of simdgroups and lanes, and another map of lanes to elements of a matrix
int deleted = -1;  // the number of a barrier that does nothing
}

namespace shim {

constexpr int LANES = 32;
constexpr size_t STACK = 256 << 10;
enum Wait { RUNS, SIMDGROUP, THREADGROUP, DONE };

struct Fiber {
  ucontext_t start;
  jmp_buf at;
  std::vector<char> stack;
  bool started = false;
  Wait wait = RUNS;
  int meeting = 0;      // which kind of meeting its simdgroup waits for
  int parity = 0;
  char slot[2][32];     // what it shows to its simdgroup
};

inline std::vector<Fiber> fibers;
inline std::vector<int> arrived;  // lanes of each simdgroup
inline ucontext_t origin;
inline jmp_buf back;
inline int current, arrived_in_all, threads;
inline long group;  // a number of the threadgroup that runs
inline bool diverged;
inline std::function<void(int)> body;

inline int lane() { return current % LANES; }
inline int simdgroup() { return current / LANES; }
inline int end(int first) { return first + LANES < threads ? first + LANES : threads; }  // the last may be short

inline void wait(Wait what) {
  Fiber& me = fibers[current];
  me.wait = what;
  if (!_setjmp(me.at)) _longjmp(back, 1);
}

inline void release(int from, int to) {
  for (int i = from; i < to; ++i)
    if (fibers[i].wait != DONE) fibers[i].wait = RUNS;
}

// All lanes of a simdgroup meet; each must come for the same kind of thing.
inline void meet(int kind) {
  const int first = simdgroup() * LANES;
  fibers[current].meeting = kind;
  for (int i = first; i < end(first); ++i)
    if (fibers[i].wait == SIMDGROUP && fibers[i].meeting != kind) diverged = true;
  if (++arrived[simdgroup()] < end(first) - first) return wait(SIMDGROUP);
  arrived[simdgroup()] = 0;
  release(first, end(first));
}

inline void simdgroup_barrier(int number) {
  if (number != deleted) meet(0);
}

inline void threadgroup_barrier(int number) {
  if (number == deleted) return;
  if (++arrived_in_all < threads) return wait(THREADGROUP);
  arrived_in_all = 0;
  release(0, threads);
}

// Threadgroup memory holds NaN at first, or in the reversed order zeros: nothing may rely on either.
inline void poison(void* memory, size_t bytes, long& poisoned) {
  if (poisoned != group) memset(memory, reversed ? 0 : 0xff, bytes);
  poisoned = group;
}

inline void enter() {
  body(current);
  fibers[current].wait = DONE;
  _longjmp(back, 1);
}

inline void resume(int i) {
  current = i;
  Fiber& fiber = fibers[i];
  if (_setjmp(back)) return;
  if (fiber.started) _longjmp(fiber.at, 1);
  fiber.started = true;
  getcontext(&fiber.start);
  fiber.stack.resize(STACK);
  fiber.start.uc_stack.ss_sp = fiber.stack.data();
  fiber.start.uc_stack.ss_size = STACK;
  fiber.start.uc_link = nullptr;
  makecontext(&fiber.start, enter, 0);
  setcontext(&fiber.start);
}

// Runs one threadgroup; 0, or 1 if its threads wait for each other for ever, 2 if lanes met for different things.
inline int run(int count, std::function<void(int)> what) {
  threads = count;
  body = what;
  fibers.resize(count);
  const int simdgroups = (count + LANES - 1) / LANES;
  arrived.assign(simdgroups, 0);
  arrived_in_all = 0;
  diverged = false;
  ++group;
  for (Fiber& fiber : fibers) fiber.started = false, fiber.wait = RUNS, fiber.parity = 0;
  for (bool left = true, moved = true; left; ) {
    if (!moved || diverged) return diverged ? 2 : 1;
    left = moved = false;
    for (int s = 0; s < simdgroups; ++s) {
      const int first = (reversed ? simdgroups - 1 - s : s) * LANES;
      for (bool any = true; any && !diverged; ) {
        any = false;
        for (int l = first; l < end(first); ++l) {
          const int i = reversed ? first + end(first) - 1 - l : l;
          if (fibers[i].wait == RUNS) any = moved = true, resume(i);
        }
      }
    }
    for (Fiber& fiber : fibers) left |= fiber.wait != DONE;
  }
  return 0;
}

}  // namespace shim
