// A team of threads that go through one forward step together.
//
// One parallel region a step, and inside it barriers: at hundreds of short phases per step, entering a region for each
// would cost more than the work. Whoever waits spins first, for the wait is mostly microseconds, then sleeps in the
// kernel, for on a shared machine the thread that is waited for may have lost its core.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <thread>
#include <vector>

namespace tie {

// A counter that goes up, and can be waited for.
class Turn {
 public:
  uint32_t now() const { return count_.load(std::memory_order_acquire); }

  void advance() {
    count_.fetch_add(1);
    if (sleepers_.load() > 0) syscall(SYS_futex, &count_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }

  void wait_beyond(uint32_t seen, int spins) {
    for (int i = 0; i < spins; ++i) {
      if (now() != seen) return;
      pause();
    }
    // Either this is seen by advance(), or the kernel sees the counter's new value and returns at once.
    sleepers_.fetch_add(1);
    while (count_.load() == seen) syscall(SYS_futex, &count_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
    sleepers_.fetch_sub(1);
  }

 private:
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "the kernel waits on the bare word");
  std::atomic<uint32_t> count_{0};
  std::atomic<int> sleepers_{0};
};

class Team {
 public:
  // The caller of run() is the first of `threads`.
  Team(int threads, int spins) : threads_(threads), spins_(threads > 1 ? spins : 0) {
    try {
      for (int member = 1; member < threads; ++member) workers_.emplace_back([this, member] { work(member); });
    } catch (...) {
      end();
      throw;
    }
  }
  ~Team() { end(); }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return threads_; }

  // Has every member call body(member), and returns when all are done.
  template <class Body>
  void run(Body& body) {
    call_ = [](void* context, int member) { (*static_cast<Body*>(context))(member); };
    context_ = &body;
    region_.advance();
    body(0);
    meet();
  }

  // Inside a region. Waits for all members. What any did before, all see afterwards.
  void meet() {
    if (threads_ == 1) {
      taken_.store(0, std::memory_order_relaxed);
      return;
    }
    const uint32_t seen = barrier_.now();
    if (arrived_.fetch_add(1) == threads_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      taken_.store(0, std::memory_order_relaxed);
      barrier_.advance();
    } else {
      barrier_.wait_beyond(seen, spins_);
    }
  }

  // Inside a region. Calls work(first, last) for pieces of `grain` items until all are taken, then waits for all
  // members. Whoever is early takes more: cores are not equally fast when others use them too.
  template <class Work>
  void share(int items, int grain, Work work) {
    for (int first; (first = taken_.fetch_add(grain, std::memory_order_relaxed)) < items;)
      work(first, first + grain < items ? first + grain : items);
    meet();
  }

 private:
  void work(int member) {
    for (uint32_t seen = 0;;) {
      region_.wait_beyond(seen, spins_);
      ++seen;
      if (ending_) return;
      call_(context_, member);
      meet();
    }
  }

  void end() {
    ending_ = true;
    region_.advance();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
  }

  const int threads_, spins_;
  std::vector<std::thread> workers_;
  void (*call_)(void*, int) = nullptr;
  void* context_ = nullptr;
  bool ending_ = false;
  alignas(64) Turn region_;
  alignas(64) Turn barrier_;
  std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> taken_{0};
};

}  // namespace tie
