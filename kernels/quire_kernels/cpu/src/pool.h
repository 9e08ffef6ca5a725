// One pool of threads: the caller and `num_threads - 1` workers that share tasks 0..n-1 of a job.
//
// Tasks are claimed one by one and a job is over when all tasks are done, not when all threads have come: a worker
// that the machine gives no core to costs nothing, as the others take its share. Workers spin for a short while
// after a job, since the next one of a step follows within microseconds, and then sleep on a futex.
#pragma once

#include <linux/futex.h>
#include <immintrin.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace quire {

class Pool {
 public:
  using Function = void (*)(void* context, int task);

  // Waits for a job in progress; workers beyond the new number end.
  void resize(int num_threads) {
    std::lock_guard<std::mutex> lock(busy_);
    if (num_threads == num_threads_) return;
    stopping_.store(true);
    wake();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
    stopping_.store(false);
    num_threads_ = num_threads;
    for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this] { work(); });
  }

  int num_threads() const { return num_threads_; }

  // Calls function(context, task) for every task, from any thread of the pool; returns when all have returned.
  void run(int num_tasks, Function function, void* context) {
    std::unique_lock<std::mutex> lock(busy_, std::try_to_lock);
    // Another engine of the process is at it, or there is nobody to share with.
    if (!lock.owns_lock() || num_threads_ == 1 || num_tasks == 1 || num_tasks > max_tasks) {
      for (int task = 0; task < num_tasks; ++task) function(context, task);
      return;
    }
    function_ = function;
    context_ = context;
    num_left_.store(num_tasks, std::memory_order_relaxed);
    uint64_t job = (state_.load(std::memory_order_relaxed) >> 40) + 1;
    state_.store(job << 40 | uint64_t(num_tasks) << 20, std::memory_order_seq_cst);
    if (num_sleeping_.load(std::memory_order_seq_cst)) wake();
    take_tasks();
    for (int spins = 0; num_left_.load(std::memory_order_acquire); ++spins) {
      // The core may be needed by the very worker that is waited for.
      if (spins < max_spins) _mm_pause();
      else sched_yield();
    }
  }

  ~Pool() { resize(1); }

 private:
  static constexpr int max_tasks = (1 << 20) - 1;
  static constexpr int max_spins = 2000;

  // Number of the job (24 bits), its tasks (20), the next one to claim (20): one word, so that nobody claims a
  // task of a job that is over.
  std::atomic<uint64_t> state_{0};
  std::atomic<int> num_left_{0};
  std::atomic<int> num_sleeping_{0};
  std::atomic<uint32_t> wakes_{0};
  std::atomic<bool> stopping_{false};
  // Valid while a task of the job is claimed and not done.
  Function function_ = nullptr;
  void* context_ = nullptr;
  std::mutex busy_;
  std::vector<std::thread> workers_;
  int num_threads_ = 1;

  bool take_tasks() {
    bool any = false;
    uint64_t state = state_.load(std::memory_order_acquire);
    for (;;) {
      uint64_t next = state & max_tasks, count = state >> 20 & max_tasks;
      if (next >= count) return any;
      if (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) continue;
      function_(context_, int(next));
      num_left_.fetch_sub(1, std::memory_order_release);
      any = true;
      state = state_.load(std::memory_order_acquire);
    }
  }

  void work() {
    int idle = 0;
    while (!stopping_.load(std::memory_order_relaxed)) {
      if (take_tasks()) {
        idle = 0;
      } else if (++idle < max_spins) {
        _mm_pause();
      } else {
        sleep();
        idle = 0;
      }
    }
  }

  void sleep() {
    uint32_t wakes = wakes_.load(std::memory_order_seq_cst);
    num_sleeping_.fetch_add(1, std::memory_order_seq_cst);
    uint64_t state = state_.load(std::memory_order_seq_cst);
    bool has_work = (state & max_tasks) < (state >> 20 & max_tasks);
    if (!has_work && !stopping_.load()) syscall(SYS_futex, &wakes_, FUTEX_WAIT_PRIVATE, wakes, nullptr, nullptr, 0);
    num_sleeping_.fetch_sub(1, std::memory_order_seq_cst);
  }

  void wake() {
    wakes_.fetch_add(1, std::memory_order_seq_cst);
    syscall(SYS_futex, &wakes_, FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
  }
};

// Never destroyed: workers may still sleep when the process ends.
inline Pool& pool() {
  static Pool* instance = new Pool;
  return *instance;
}

template <class F>
inline void parallel_for(int num_tasks, F&& body) {
  auto call = [](void* context, int task) { (*static_cast<std::remove_reference_t<F>*>(context))(task); };
  if (num_tasks > 0) pool().run(num_tasks, call, const_cast<std::remove_const_t<std::remove_reference_t<F>>*>(&body));
}

// Calls body(i) for every i of [0, count); a task takes `each` of them, but at least one.
template <class F>
inline void parallel_for(int64_t count, int64_t each, F&& body) {
  each = std::max<int64_t>(each, 1);
  parallel_for(int((count + each - 1) / each), [&](int task) {
    const int64_t first = task * each, stop = std::min(count, first + each);
    for (int64_t i = first; i < stop; ++i) body(i);
  });
}

// Calls body(i) for every i of [0, count). Each thread begins with a stretch of its own and takes it in order, so that what
// it asks for ahead is what it reads next; when it is through, it takes the last ones of others.
template <class F>
inline void parallel_stretches(int count, F&& body) {
  struct alignas(64) Stretch {
    std::atomic<uint64_t> left;  // first << 32 | end

    // Its first or its last; -1: there is none left.
    int64_t take(bool is_own) {
      uint64_t now = left.load(std::memory_order_relaxed);
      for (;;) {
        const uint64_t first = now >> 32, end = now & 0xffffffff;
        if (first >= end) return -1;
        if (left.compare_exchange_weak(now, is_own ? now + (uint64_t{1} << 32) : now - 1, std::memory_order_relaxed))
          return int64_t(is_own ? first : end - 1);
      }
    }
  };
  constexpr int most = 512;
  Stretch stretches[most];
  const int num = std::min({pool().num_threads(), count, most});
  auto border = [&](int i) { return uint64_t(int64_t(count) * i / num); };
  for (int i = 0; i < num; ++i) stretches[i].left.store(border(i) << 32 | border(i + 1), std::memory_order_relaxed);
  parallel_for(num, [&](int own) {
    for (int i = 0; i < num; ++i)
      for (int64_t task; (task = stretches[(own + i) % num].take(i == 0)) >= 0;) body(int(task));
  });
}

// Calls body(i, j) for every j of [0, count(i)) of every i of [0, num).
template <class Count, class Body>
void parallel_for_all(int64_t num, Count&& count, Body&& body) {
  std::vector<int64_t> ends;
  int64_t total = 0;
  for (int64_t i = 0; i < num; ++i) ends.push_back(total += count(i));
  parallel_stretches(int(total), [&](int task) {
    const int64_t i = std::upper_bound(ends.begin(), ends.end(), task) - ends.begin();
    body(i, task - (i ? ends[i - 1] : 0));
  });
}

}  // namespace quire
