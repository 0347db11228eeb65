// Runs CUDA kernels on the host: every thread of a block is a fiber, one block at a
// time. Fibers switch where threads wait for each other and, at random, at atomics, so
// another seed is another order. A barrier that not all threads reach ends the process.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

#include <ucontext.h>

#define __global__
#define __device__
#define __constant__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(n)

namespace host {

struct Index {
  unsigned x;
};

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(64 * 1024);
  unsigned id = 0;
  bool done = false;
  long block_waits = 0, warp_waits = 0; // barriers arrived at
};

struct Warp {
  unsigned long long values[2][32];
  long opened = 0;
  int arrived = 0, lanes = 0;
};

inline Index grid_index, block_index, block_size;
inline ucontext_t scheduler;
inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline Fiber* current;
inline long block_opened;
inline int block_arrived, block_alive;
inline bool block_or[2];
inline std::mt19937 order;
inline void (*body)();

inline void yield() { swapcontext(&current->context, &scheduler); }

inline void maybe_yield() {
  if (order() % 8 == 0) yield();
}

inline void check_warp(Warp& w) {
  if (w.arrived >= w.lanes) {
    w.arrived = 0;
    w.opened++;
  }
}

inline void check_block() {
  if (block_arrived >= block_alive) {
    block_arrived = 0;
    block_opened++;
    block_or[block_opened % 2] = false;
  }
}

inline void block_barrier() {
  current->block_waits++;
  block_arrived++;
  check_block();
  while (block_opened < current->block_waits) yield();
}

// Hand a value to the other lanes; returns all lanes' values.
inline const unsigned long long* exchange(unsigned long long value) {
  Warp& w = warps[current->id / 32];
  long turn = current->warp_waits++;
  w.values[turn % 2][current->id % 32] = value;
  w.arrived++;
  check_warp(w);
  while (w.opened < current->warp_waits) yield();
  return w.values[turn % 2];
}

inline void entry() {
  body();
  current->done = true;
  Warp& w = warps[current->id / 32];
  w.lanes--;
  if (w.lanes > 0) check_warp(w);
  block_alive--;
  if (block_alive > 0) check_block();
  swapcontext(&current->context, &scheduler);
}

inline void run_block(unsigned threads) {
  fibers.resize(threads);
  warps.assign((threads + 31) / 32, Warp());
  block_opened = block_arrived = 0;
  block_alive = threads;
  block_or[0] = block_or[1] = false;
  for (unsigned i = 0; i < threads; i++) {
    Fiber& f = fibers[i];
    f.id = i;
    f.done = false;
    f.block_waits = f.warp_waits = 0;
    warps[i / 32].lanes++;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.data();
    f.context.uc_stack.ss_size = f.stack.size();
    f.context.uc_link = &scheduler;
    makecontext(&f.context, entry, 0);
  }
  std::vector<unsigned> turn(threads);
  for (unsigned i = 0; i < threads; i++) turn[i] = i;
  long idle = 0;
  while (block_alive > 0) {
    std::shuffle(turn.begin(), turn.end(), order);
    long before = block_opened + block_alive;
    for (Warp& w : warps) before += w.opened;
    for (unsigned i : turn) {
      if (fibers[i].done) continue;
      current = &fibers[i];
      swapcontext(&scheduler, &current->context);
    }
    long after = block_opened + block_alive;
    for (Warp& w : warps) after += w.opened;
    idle = after == before ? idle + 1 : 0;
    if (idle > 100000) {
      std::fprintf(stderr, "threads wait for each other for ever\n");
      std::abort();
    }
  }
}

template <class T> T unpack(unsigned long long value) {
  if constexpr (std::is_pointer_v<T>)
    return reinterpret_cast<T>(value);
  else
    return static_cast<T>(value);
}

template <class... A, std::size_t... I>
void launch(
    void (*kernel)(A...), unsigned grid, unsigned block, const unsigned long long* args,
    std::index_sequence<I...>) {
  static void (*the_kernel)(A...);
  static const unsigned long long* the_args;
  the_kernel = kernel;
  the_args = args;
  body = [] { the_kernel(unpack<A>(the_args[I])...); };
  block_size.x = block;
  for (unsigned b = 0; b < grid; b++) {
    block_index.x = b;
    run_block(block);
  }
}

template <class... A>
void launch(
    void (*kernel)(A...), unsigned grid, unsigned block,
    const unsigned long long* args) {
  launch(kernel, grid, block, args, std::index_sequence_for<A...>());
}

} // namespace host

#define threadIdx (host::Index{host::current->id})
#define blockIdx host::block_index
#define blockDim host::block_size

template <class A, class B> std::common_type_t<A, B> min(A a, B b) {
  return a < b ? a : b;
}
template <class A, class B> std::common_type_t<A, B> max(A a, B b) {
  return a > b ? a : b;
}
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(unsigned x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }

inline void __syncthreads() { host::block_barrier(); }
inline int __syncthreads_or(int value) {
  bool& any = host::block_or[host::current->block_waits % 2];
  any = any || value;
  host::block_barrier();
  return any;
}
inline void __syncwarp() { host::exchange(0); }
template <class T> T __shfl_sync(unsigned, T value, int lane) {
  return (T)host::exchange((unsigned long long)value)[lane & 31];
}
template <class T> T __shfl_up_sync(unsigned, T value, int by) {
  int lane = host::current->id % 32;
  auto all = host::exchange((unsigned long long)value);
  return lane < by ? value : (T)all[lane - by];
}
template <class T> T __shfl_xor_sync(unsigned, T value, int with) {
  return (T)host::exchange((unsigned long long)value)[(host::current->id % 32) ^ with];
}
inline unsigned __ballot_sync(unsigned, int value) {
  auto all = host::exchange(value != 0);
  unsigned bits = 0;
  for (int i = 0; i < 32; i++) bits |= (unsigned)all[i] << i;
  return bits;
}
inline int __any_sync(unsigned mask, int value) {
  return __ballot_sync(mask, value) != 0;
}
template <class T> T __reduce_add_sync(unsigned, T value) {
  auto all = host::exchange((unsigned long long)value);
  T sum = 0;
  for (int i = 0; i < 32; i++) sum += (T)all[i];
  return sum;
}
template <class T> T __reduce_max_sync(unsigned, T value) {
  auto all = host::exchange((unsigned long long)value);
  T most = (T)all[0];
  for (int i = 1; i < 32; i++) most = max(most, (T)all[i]);
  return most;
}
template <class T, class V> T atomicAdd(T* at, V value) {
  host::maybe_yield();
  T was = *at;
  *at += (T)value;
  return was;
}
template <class T, class V> T atomicMax(T* at, V value) {
  host::maybe_yield();
  T was = *at;
  *at = max(was, (T)value);
  return was;
}
inline int atomicExch(int* at, int value) {
  host::maybe_yield();
  int was = *at;
  *at = value;
  return was;
}
inline void __nanosleep(unsigned) { host::yield(); }
inline void __threadfence() { host::maybe_yield(); }
inline int atomicCAS(int* at, int compare, int value) {
  host::maybe_yield();
  int was = *at;
  if (was == compare) *at = value;
  return was;
}
