/* Loaded with LD_PRELOAD: makes calls on files below one folder hang or fail, as a control file says at that moment.

   STORAGE_FOLDER   the folder, absolute
   STORAGE_CONTROL  a file: missing or empty passes everything; "hang CALLS" waits while it says so; "NUMBER CALLS" fails
                    with that errno. CALLS are names such as open,write,fsync,rename,mkdir,list or "all". */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

static int says(const char *call, char *content, size_t size) {
    const char *control = getenv("STORAGE_CONTROL");
    if (!control) return 0;
    int fd = syscall(SYS_openat, AT_FDCWD, control, O_RDONLY | O_CLOEXEC, 0);
    if (fd < 0) return 0;
    ssize_t got = syscall(SYS_read, fd, content, size - 1);
    syscall(SYS_close, fd);
    if (got <= 0) return 0;
    content[got] = 0;
    return strstr(content, call) || strstr(content, "all");
}

/* 0 to go on, or the errno to fail with */
static int verdict(const char *call) {
    char content[128];
    while (says(call, content, sizeof content)) {
        if (strncmp(content, "hang", 4) != 0) return atoi(content);
        usleep(20000);
    }
    return 0;
}

static int below(const char *path) {
    const char *folder = getenv("STORAGE_FOLDER");
    return folder && path && strncmp(path, folder, strlen(folder)) == 0;
}

static int below_at(int at, const char *path) {
    char name[PATH_MAX], link[64];
    if (path && path[0] == '/') return below(path);
    if (at == AT_FDCWD) return 0; /* everstep uses absolute paths */
    snprintf(link, sizeof link, "/proc/self/fd/%d", at);
    ssize_t got = syscall(SYS_readlinkat, AT_FDCWD, link, name, sizeof name - 1);
    if (got <= 0) return 0;
    name[got] = 0;
    return below(name);
}

static int below_fd(int fd) { return below_at(fd, ""); }

#define REAL(name) ((typeof(&name))dlsym(RTLD_NEXT, #name))
#define ASK(is_ours, call) do { if (is_ours) { int error = verdict(call); if (error) { errno = error; return -1; } } } while (0)
#define MODE mode_t mode = 0; if (flags & (O_CREAT | O_TMPFILE)) { va_list more; va_start(more, flags); mode = va_arg(more, mode_t); va_end(more); }

int open(const char *path, int flags, ...) { MODE ASK(below(path), "open"); return REAL(open)(path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE ASK(below(path), "open"); return REAL(open64)(path, flags, mode); }
int openat(int at, const char *path, int flags, ...) { MODE ASK(below_at(at, path), "open"); return REAL(openat)(at, path, flags, mode); }
int openat64(int at, const char *path, int flags, ...) { MODE ASK(below_at(at, path), "open"); return REAL(openat64)(at, path, flags, mode); }
ssize_t write(int fd, const void *data, size_t size) { ASK(below_fd(fd), "write"); return REAL(write)(fd, data, size); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { ASK(below_fd(fd), "write"); return REAL(pwrite)(fd, data, size, at); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) { ASK(below_fd(fd), "write"); return REAL(pwrite64)(fd, data, size, at); }
int fsync(int fd) { ASK(below_fd(fd), "fsync"); return REAL(fsync)(fd); }
int rename(const char *from, const char *to) { ASK(below(to), "rename"); return REAL(rename)(from, to); }
int mkdir(const char *path, mode_t mode) { ASK(below(path), "mkdir"); return REAL(mkdir)(path, mode); }
DIR *opendir(const char *path) {
    if (below(path)) { int error = verdict("list"); if (error) { errno = error; return NULL; } }
    return REAL(opendir)(path);
}
