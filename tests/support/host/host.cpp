// The scheduler of host.h: fibers on stacks of their own, switched by setjmp and longjmp after a first entry by ucontext.
#include "host/host.h"

#include <algorithm>
#include <csetjmp>
#include <dlfcn.h>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <ucontext.h>
#include <utility>
#include <vector>

host::Index threadIdx, blockIdx, blockDim, gridDim;

namespace host {
namespace {

constexpr size_t kStack = 128 * 1024, kMost = 1024;
constexpr uint32_t kPoison = 0x7fc0dead;  // NaN in float32; its halves are NaN or tiny in 16-bit formats

enum class State { ready, lanes, block, polls, done };

struct Copy {
  void *to;
  const void *from;
  size_t bytes;
  bool zero;
};

struct Fiber {
  std::unique_ptr<char[]> stack{new char[kStack]};
  ucontext_t start;
  jmp_buf context;
  bool entered;
  State state;
  std::vector<std::vector<Copy>> copies;  // by group, the open one last
};

struct Warp {
  unsigned char slots[2][32 * kStride];
  unsigned phase[32];
  int arrived;
};

struct Phase {
  unsigned arrivals, arrived, parity;
  long bytes;  // announced less come
  std::vector<Copy> copies;
};

std::vector<Fiber> fibers;
std::map<uint64_t *, Phase> phases;
std::vector<Warp> warps;
std::vector<uint32_t> memory;
const std::function<void()> *work;
const char *problem;
jmp_buf scheduler;
unsigned threads, current, alive, at_barrier, order_seed;
int yes, votes_all, votes_any, votes_count;
std::mutex one_launch;
std::string launches;  // a line each
bool dry;
uint64_t conflicts;  // of matrices' rows

void yield(State state) {
  Fiber &fiber = fibers[current];
  fiber.state = state;
  if (!_setjmp(fiber.context)) _longjmp(scheduler, 1);
}

void perform(const Copy &copy) {
  if (copy.zero) memset(copy.to, 0, copy.bytes);
  else memcpy(copy.to, copy.from, copy.bytes);
}

void complete(Fiber &fiber, size_t keep) {
  while (fiber.copies.size() > keep) {
    for (const Copy &copy : fiber.copies.front()) perform(copy);
    fiber.copies.erase(fiber.copies.begin());
  }
}

void release_barrier() {
  if (at_barrier == 0 || at_barrier != alive) return;
  votes_count = yes, votes_any = yes > 0, votes_all = yes == int(at_barrier);
  yes = 0, at_barrier = 0;
  for (unsigned i = 0; i < threads; ++i)
    if (fibers[i].state == State::block) fibers[i].state = State::ready;
}

void enter() {
  (*work)();
  fibers[current].state = State::done;
  --alive;
  release_barrier();
  _longjmp(scheduler, 1);
}

void resume(unsigned index) {
  current = index;
  threadIdx = {index, 0, 0};
  Fiber &fiber = fibers[index];
  if (_setjmp(scheduler)) return;
  if (fiber.entered) _longjmp(fiber.context, 1);
  fiber.entered = true;
  setcontext(&fiber.start);
}

// Warps in a random order, and a warp's lanes.
void shuffle(std::vector<unsigned> &order, std::minstd_rand &random) {
  const unsigned count = unsigned(order.size()) / 32;
  for (unsigned i = 0; i < order.size(); ++i) order[i] = i;
  for (unsigned warp = count; warp > 1; --warp) {
    const unsigned other = random() % warp;
    std::swap_ranges(&order[32 * warp - 32], &order[32 * warp - 32] + 32, &order[32 * other]);
  }
  for (unsigned i = 0; i < order.size(); ++i) std::swap(order[i], order[i / 32 * 32 + random() % 32]);
}

bool run_block(std::vector<unsigned> &order, std::minstd_rand &random) {
  std::fill(memory.begin(), memory.end(), kPoison);
  for (Warp &warp : warps) warp = Warp{};
  phases.clear();
  alive = threads, at_barrier = 0, yes = 0;
  for (unsigned i = 0; i < threads; ++i) {
    Fiber &fiber = fibers[i];
    fiber.entered = false, fiber.state = State::ready;
    fiber.copies.assign(1, {});
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = kStack;
    makecontext(&fiber.start, enter, 0);
  }
  if (order_seed) shuffle(order, random);
  while (alive) {
    bool moved = false;
    for (unsigned i = 0; i < threads; ++i)
      if (fibers[i].state == State::polls) fibers[i].state = State::ready;
    for (unsigned first = 0; first < threads; first += 32) {
      // With a seed, a warp runs as far ahead of the others as it can; without, all take turns.
      for (bool again = true; again;) {
        again = false;
        for (unsigned i = first; i < first + 32; ++i)
          if (fibers[order[i]].state == State::ready) resume(order[i]), moved = true, again = order_seed != 0;
      }
    }
    if (!moved) return false;
  }
  return true;
}

}  // namespace

uint64_t products;

void note(const void *address, std::initializer_list<size_t> grid) {
  Dl_info found;
  if (launches.size() > 4096) launches.clear();
  launches += dladdr(address, &found) && found.dli_sname ? found.dli_sname : "?";
  for (const size_t number : grid) launches += " " + std::to_string(number);
  launches += "\n";
}

const char *run(const void *address, int x, int y, int z, int count, size_t shared, const std::function<void()> &kernel) {
  std::lock_guard<std::mutex> lock(one_launch);
  note(address, {size_t(x), size_t(y), size_t(z), size_t(count), shared});
  if (dry) return nullptr;
  if (count < 1 || count > int(kMost) || count % 32) return "host: a block has 32 to 1024 threads, whole warps";
  if (x < 1 || y < 1 || z < 1 || y > 65535 || z > 65535) return "host: the grid is empty or too large";
  threads = count, work = &kernel, problem = "host: threads wait for something that cannot come";
  if (fibers.size() < threads) fibers.resize(threads);
  warps.resize(threads / 32);
  memory.assign((shared + 3) / 4 + 4, kPoison);
  blockDim = {threads, 1, 1}, gridDim = {unsigned(x), unsigned(y), unsigned(z)};
  std::vector<unsigned> order(threads);
  for (unsigned i = 0; i < threads; ++i) order[i] = i;
  std::minstd_rand random(order_seed);
  for (int k = 0; k < z; ++k)
    for (int j = 0; j < y; ++j)
      for (int i = 0; i < x; ++i) {
        blockIdx = {unsigned(i), unsigned(j), unsigned(k)};
        if (!run_block(order, random)) return problem;
      }
  return nullptr;
}

void expect(bool holds, const char *what) {
  if (holds) return;
  problem = what;
  yield(State::block);  // for ever: this thread's barrier is never counted
}

void barrier() {
  int all, any, count;
  vote(false, &all, &any, &count);
}

void vote(bool value, int *all, int *any, int *count) {
  ++at_barrier, yes += value;
  if (at_barrier == alive) {
    fibers[current].state = State::block;
    release_barrier();
    fibers[current].state = State::ready;
  }
  else yield(State::block);
  *all = votes_all, *any = votes_any, *count = votes_count;
}

const unsigned char *exchange(const void *mine, size_t bytes) {
  Warp &warp = warps[current / 32];
  const unsigned lane = current % 32;
  unsigned char *slots = warp.slots[warp.phase[lane]++ & 1];
  memcpy(slots + kStride * lane, mine, bytes);
  if (++warp.arrived == 32) {
    warp.arrived = 0;
    for (unsigned i = current - lane; i < current - lane + 32; ++i)
      if (fibers[i].state == State::lanes) fibers[i].state = State::ready;
  } else {
    yield(State::lanes);
  }
  return slots;
}

unsigned lane() { return threadIdx.x % 32; }

// An odd seed copies at once, for a copy may come as early as that; else only when waited for.
void later(void *to, const void *from, size_t bytes, bool zero) {
  expect(aligned(to) && aligned(from), "host: an asynchronous copy is not aligned to 16 bytes");
  const Copy copy = {to, from, bytes, zero};
  if (order_seed % 2) perform(copy);
  else fibers[current].copies.back().push_back(copy);
}
void group() { fibers[current].copies.emplace_back(); }
void wait(int groups) { complete(fibers[current], size_t(groups) + 1); }

unsigned char *dynamic() {
  return reinterpret_cast<unsigned char *>((reinterpret_cast<uintptr_t>(memory.data()) + 15) & ~uintptr_t(15));
}

void phase_init(uint64_t *at, unsigned arrivals) { phases[at] = Phase{arrivals, 0, 0, 0, {}}; }
Phase &phase_of(uint64_t *at) {
  if (!phases.count(at)) yield(State::block);  // never made ready: nobody will come
  return phases[at];
}
void phase_arrive(uint64_t *at, unsigned bytes) {
  Phase &phase = phase_of(at);
  phase.bytes += bytes, ++phase.arrived;
}
void phase_copy(uint64_t *at, void *to, const void *from, size_t bytes) {
  Phase &phase = phase_of(at);
  expect(aligned(to) && aligned(from) && bytes % 16 == 0, "host: a bulk copy is not of aligned 16 bytes");
  const Copy copy = {to, from, bytes, false};
  if (order_seed % 2) perform(copy), phase.bytes -= long(bytes);
  else phase.copies.push_back(copy);
}
void phase_wait(uint64_t *at, unsigned parity) {
  Phase &phase = phase_of(at);
  for (int patience = 0; phase.parity == parity; ++patience) {
    for (const Copy &copy : phase.copies) perform(copy), phase.bytes -= long(copy.bytes);
    phase.copies.clear();
    if (phase.arrived == phase.arrivals && phase.bytes == 0) phase.arrived = 0, phase.parity ^= 1;
    else yield(patience < 1000 ? State::polls : State::block);
  }
}

// Eight rows of 16 bytes are read at once where they lie in all 32 banks; a row in the same four as another waits for it.
void read_matrix(const unsigned char *rows) {
  unsigned taken = 0;
  for (int i = 0; i < 8; ++i) {
    uintptr_t row;
    memcpy(&row, rows + kStride * i, sizeof row);
    const unsigned banks = 1u << row / 16 % 8;
    conflicts += (taken & banks) != 0, taken |= banks;
  }
}

float half_to_float(uint16_t bits) {
  _Float16 half;
  memcpy(&half, &bits, 2);
  return float(half);
}
uint16_t float_to_half(float x) {
  const _Float16 half = _Float16(x);
  uint16_t bits;
  memcpy(&bits, &half, 2);
  return bits;
}

}  // namespace host

// The order in which threads take turns, and when copies are done; 0: by index, and late.
extern "C" void specbuild_host_order(unsigned seed) { host::order_seed = seed; }

// What was launched since the last call, a line each: the kernel's name, its grid, threads a block and bytes of shared memory.
extern "C" const char *specbuild_host_launches() {
  static std::string taken;
  taken.swap(host::launches);
  host::launches.clear();
  return taken.c_str();
}

// Since the last call: rows of matrices that had to wait for another's banks, and products of 64 bits.
extern "C" uint64_t specbuild_host_conflicts() { return std::exchange(host::conflicts, 0); }
extern "C" uint64_t specbuild_host_products() { return std::exchange(host::products, 0); }

// 1: launches are noted and not run; 0: they are run.
extern "C" void specbuild_host_dry(int on) { host::dry = on; }
