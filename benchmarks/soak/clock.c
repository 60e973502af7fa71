/* A wall clock that jumps. Preloaded into a process, adds the offset in the file named by SOAK_CLOCK (a double, seconds) to
 * CLOCK_REALTIME and nothing else, as an operator who sets the clock does. The file is mapped: a jump is one store. A process
 * that sets its wall clock sets this offset, and never the machine's clock.
 *
 * Waits until an absolute wall-clock time would wait for the offset as well, which no set clock does: they are translated
 * back. Deadlines of the monotonic clock are distinguished by their size (uptime against seconds since 1970). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define EPOCH_S_MIN 1000000000L

static volatile double none = 0.0;
static volatile double *offset_s = &none;

static long (*real_syscall)(long, ...);
static int (*real_gettime)(clockid_t, struct timespec *);
static int (*real_settime)(clockid_t, const struct timespec *);
static int (*real_cond)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
static int (*real_sem)(sem_t *, const struct timespec *);
static int (*real_mutex)(pthread_mutex_t *, const struct timespec *);

__attribute__((constructor)) static void open_clock(void) {
  real_syscall = dlsym(RTLD_NEXT, "syscall");
  real_gettime = dlsym(RTLD_NEXT, "clock_gettime");
  real_settime = dlsym(RTLD_NEXT, "clock_settime");
  real_cond = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
  real_sem = dlsym(RTLD_NEXT, "sem_timedwait");
  real_mutex = dlsym(RTLD_NEXT, "pthread_mutex_timedlock");
  const char *path = getenv("SOAK_CLOCK");
  int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
  if (fd < 0) return;
  void *map = mmap(NULL, sizeof(double), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (map != MAP_FAILED) offset_s = map;
}

static void shift(struct timespec *t, double by_s) {
  long whole = (long)by_s;
  t->tv_sec += whole;
  t->tv_nsec += (long)((by_s - (double)whole) * 1e9);
  if (t->tv_nsec >= 1000000000L) { t->tv_nsec -= 1000000000L; t->tv_sec++; }
  if (t->tv_nsec < 0) { t->tv_nsec += 1000000000L; t->tv_sec--; }
}

static const struct timespec *truly(const struct timespec *until, struct timespec *room) {
  if (!until || *offset_s == 0.0 || until->tv_sec < EPOCH_S_MIN) return until;
  *room = *until;
  shift(room, -*offset_s);
  return room;
}

int clock_gettime(clockid_t clock, struct timespec *t) {
  if (!real_gettime) open_clock(); /* another library's constructor asks before ours has run */
  int failed = real_gettime(clock, t);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) shift(t, *offset_s);
  return failed;
}

int clock_settime(clockid_t clock, const struct timespec *t) {
  if (!real_gettime) open_clock();
  if (clock != CLOCK_REALTIME) return real_settime(clock, t);
  struct timespec now;
  if (real_gettime(CLOCK_REALTIME, &now)) return -1;
  if (offset_s == &none) { errno = EPERM; return -1; }
  *offset_s = (double)(t->tv_sec - now.tv_sec) + (double)(t->tv_nsec - now.tv_nsec) / 1e9;
  return 0;
}

int gettimeofday(struct timeval *restrict t, void *restrict zone) {
  struct timespec now;
  (void)zone;
  if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
  t->tv_sec = now.tv_sec;
  t->tv_usec = now.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *t) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (t) *t = now.tv_sec;
  return now.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *c, pthread_mutex_t *m, const struct timespec *until) {
  struct timespec room;
  return real_cond(c, m, truly(until, &room));
}

int sem_timedwait(sem_t *s, const struct timespec *until) {
  struct timespec room;
  return real_sem(s, truly(until, &room));
}

int pthread_mutex_timedlock(pthread_mutex_t *m, const struct timespec *until) {
  struct timespec room;
  return real_mutex(m, truly(until, &room));
}

/* gRPC's own mutexes sleep on futexes by name. */
long syscall(long number, ...) {
  long a[6];
  va_list rest;
  va_start(rest, number);
  for (int i = 0; i < 6; i++) a[i] = va_arg(rest, long);
  va_end(rest);
  struct timespec room;
  if (number == SYS_futex && (a[1] & FUTEX_CLOCK_REALTIME)) a[3] = (long)truly((const struct timespec *)a[3], &room);
  return real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
