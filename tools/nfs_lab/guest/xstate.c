/* Preload this library into the user-mode-linux process on CPUs with a large XSAVE state.
 *
 * UML 6.1 passes ptrace a buffer of 2,696 bytes for the NT_X86_XSTATE register set. On a CPU with AMX the state has
 * 11,008 bytes, and PTRACE_SETREGSET of a part of it fails (EFAULT): UML panics at boot with "ptrace set fp regs
 * failed". This ptrace() reads the whole state first, gives UML its part, and writes that part back over the whole. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define NT_X86_XSTATE 0x202
#define STATE_BYTES (1 << 15)

static long system_ptrace(long request, long pid, void *addr, void *data) {
    return syscall(SYS_ptrace, request, pid, addr, data);
}

static long transfer_xstate(long request, long pid, void *addr, struct iovec *part) {
    static __thread char state[STATE_BYTES] __attribute__((aligned(64)));
    struct iovec whole = {state, sizeof state};
    long result = system_ptrace(PTRACE_GETREGSET, pid, addr, &whole);
    if (result < 0) return result;
    size_t nbytes = part->iov_len < whole.iov_len ? part->iov_len : whole.iov_len;
    if (request == PTRACE_GETREGSET) {
        memcpy(part->iov_base, state, nbytes);
        part->iov_len = nbytes;
        return 0;
    }
    memcpy(state, part->iov_base, nbytes);
    return system_ptrace(PTRACE_SETREGSET, pid, addr, &whole);
}

long ptrace(enum __ptrace_request request, ...) {
    va_list arguments;
    va_start(arguments, request);
    long pid = va_arg(arguments, int);
    void *addr = va_arg(arguments, void *);
    void *data = va_arg(arguments, void *);
    va_end(arguments);
    if ((request == PTRACE_GETREGSET || request == PTRACE_SETREGSET) && (long)addr == NT_X86_XSTATE)
        return transfer_xstate(request, pid, addr, data);
    if (request >= PTRACE_PEEKTEXT && request <= PTRACE_PEEKUSER) {
        /* The system call stores the word at `data`; the C library's function returns it. */
        long word, result = system_ptrace(request, pid, addr, &word);
        if (result < 0) return result;
        errno = 0;
        return word;
    }
    return system_ptrace(request, pid, addr, data);
}
