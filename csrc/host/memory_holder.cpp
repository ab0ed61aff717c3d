// A process that shares the memory of this one, and outlives it by a moment.
//
// The kernel frees the memory of a killed process, about 0.1 ms for each megabyte, before it closes
// the process's files, so that its connections look alive meanwhile. If another process shares the
// memory, there is nothing to free, and the connections are closed at once.
#include <pybind11/pybind11.h>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <ctime>
#endif

namespace py = pybind11;

namespace hstu {
namespace {

#if defined(__linux__)
constexpr size_t kStackBytes = size_t{64} << 10;
constexpr timespec kInterval = {0, 200'000'000};  // between two looks at the parent

bool close_files_from(unsigned first) { return syscall(SYS_close_range, first, ~0U, 0) == 0; }

// The main function of the process. It returns after the end of `parent`.
// NOTE: errno is shared with the parent, so no system call may fail here and write it. Signals,
// which could interrupt the calls, are blocked.
int hold_memory(void* parent) {
  close_files_from(0);
  prctl(PR_SET_NAME, "memory-holder");
  while (getppid() == static_cast<pid_t>(reinterpret_cast<intptr_t>(parent))) {
    nanosleep(&kInterval, nullptr);
  }
  return 0;
}

int start_memory_holder() {
  static const int process = [] {
    // A kernel before 5.9 cannot close all files by one call. The process would keep them open.
    if (!close_files_from(~0U)) return 0;
    void* const stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
    if (stack == MAP_FAILED) return 0;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const auto parent = static_cast<intptr_t>(getpid());
    // NOTE: without a signal at its end, waitpid() of the parent does not see the process.
    const int result = clone(hold_memory, static_cast<char*>(stack) + kStackBytes, CLONE_VM,
                             reinterpret_cast<void*>(parent));
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (result < 0) munmap(stack, kStackBytes);
    return result < 0 ? 0 : result;
  }();
  return process;
}
#else
int start_memory_holder() { return 0; }
#endif

}  // namespace

void bind_memory_holder(py::module_& m) {
  m.def("start_memory_holder", &start_memory_holder,
        "Starts a process that has the memory of this one until up to 0.2 s after its end, so that "
        "the kernel closes the connections of this process as soon as it is killed, and frees its "
        "memory afterwards. Later calls start no other one. Returns its id, or 0 where the system "
        "does not allow it.");
}

}  // namespace hstu
