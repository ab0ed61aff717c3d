// Linked into the libraries of a wheel by tools/build_wheels.py, and into no other build.
//
// The wheel is to run with glibc 2.28 and libstdc++ 8, the oldest that torch itself runs with. What
// the compiler's headers and cudart_static refer to gets the newest version that the building
// machine's libraries offer, which older ones lack. Each function below takes the place of such a
// reference (`ld --wrap`) and jumps to a version, or to another function, that the old libraries
// have too.
  .text

// `name` exists since `version`; glibc 2.34 gave it a second version when it moved to libc.so.
.macro older name, version=GLIBC_2.2.5
  .symver old_\name, \name@\version
  .globl __wrap_\name
  .hidden __wrap_\name
  .type __wrap_\name, @function
__wrap_\name:
  jmp old_\name@PLT
.endm

// `name` does not exist in old libraries. What follows takes its place.
.macro instead name
  .globl __wrap_\name
  .hidden __wrap_\name
  .type __wrap_\name, @function
__wrap_\name:
.endm

older exp
older dlclose
older dlerror
older dlmopen, GLIBC_2.3.4
older dlopen
older dlsym
older dlvsym
older pthread_condattr_setpshared
older pthread_create
older pthread_detach
older pthread_getspecific
older pthread_join
older pthread_key_create
older pthread_key_delete
older pthread_kill
older pthread_mutex_trylock
older pthread_mutexattr_destroy
older pthread_mutexattr_init
older pthread_mutexattr_setpshared
older pthread_mutexattr_settype
older pthread_once
older pthread_rwlock_destroy
older pthread_rwlock_init
older pthread_rwlock_rdlock
older pthread_rwlock_timedrdlock
older pthread_rwlock_timedwrlock
older pthread_rwlock_tryrdlock
older pthread_rwlock_trywrlock
older pthread_rwlock_unlock
older pthread_rwlock_wrlock
older pthread_rwlockattr_destroy
older pthread_rwlockattr_init
older pthread_rwlockattr_setpshared
older pthread_setspecific
older pthread_spin_destroy
older pthread_spin_init
older pthread_spin_lock
older pthread_spin_trylock
older pthread_spin_unlock
older sem_destroy
older sem_init
older sem_post
older sem_timedwait
older sem_trywait
older sem_wait
older shm_open
older shm_unlink

// std::stringstream() and std::ostringstream(): their constructors from an openmode.
instead _ZNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEC1Ev
  mov $24, %esi // in | out
  jmp _ZNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEC1ESt13_Ios_Openmode@PLT
instead _ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev
  mov $16, %esi // out
  jmp _ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1ESt13_Ios_Openmode@PLT

// str() const& and str()&& of C++20, for each kind of string stream and its buffer: str() const.
instead _ZNKRSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv
  jmp _ZNKSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv@PLT
instead _ZNOSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv
  jmp _ZNKSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv@PLT
instead _ZNKRSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEE3strEv
  jmp _ZNKSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEE3strEv@PLT
instead _ZNOSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEE3strEv
  jmp _ZNKSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEE3strEv@PLT
instead _ZNKRSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEE3strEv
  jmp _ZNKSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEE3strEv@PLT
instead _ZNOSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEE3strEv
  jmp _ZNKSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEE3strEv@PLT

// std::__throw_bad_array_new_length(): throw std::bad_alloc, its base class.
instead _ZSt28__throw_bad_array_new_lengthv
  jmp _ZSt17__throw_bad_allocv@PLT

// std::exception_ptr's _M_addref() and _M_release(): the copy constructor, from the pointer itself,
// and the destructor, which also makes the pointer null. An object may hold a copy of these two
// inline functions that would call back here; the copies are weak, so the symbols defined here win.
.macro from_libstdcxx name
  .symver libstdcxx_\name, \name@CXXABI_1.3.3
  .globl \name
  .hidden \name
  .type \name, @function
\name:
  jmp libstdcxx_\name@PLT
.endm

from_libstdcxx _ZNSt15__exception_ptr13exception_ptrC1ERKS0_
from_libstdcxx _ZNSt15__exception_ptr13exception_ptrD1Ev
instead _ZNSt15__exception_ptr13exception_ptr9_M_addrefEv
  mov %rdi, %rsi
  jmp _ZNSt15__exception_ptr13exception_ptrC1ERKS0_
instead _ZNSt15__exception_ptr13exception_ptr10_M_releaseEv
  jmp _ZNSt15__exception_ptr13exception_ptrD1Ev

// A hint of glibc 2.32 that reference counts need no atomic instructions. Zero says that they do.
  .section .rodata
  .globl __libc_single_threaded
  .hidden __libc_single_threaded
  .type __libc_single_threaded, @object
  .size __libc_single_threaded, 1
__libc_single_threaded:
  .byte 0

  .section .note.GNU-stack, "", @progbits
