// Preloaded into a process: the clock of the day jumps by up to a day at each look, forwards and backwards. All else keeps the true time, so that a wait
// until a time of that clock ends at once or a day later.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <sys/time.h>
#include <time.h>

static long jump(void) {
  static atomic_uint looks;
  unsigned n = 2654435761u * atomic_fetch_add(&looks, 1u);
  return (long)(n % 172800u) - 86400;
}

int clock_gettime(clockid_t clock, struct timespec* at) {
  static int (*real)(clockid_t, struct timespec*);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int failed = real(clock, at);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += jump();
  return failed;
}

int gettimeofday(struct timeval* restrict at, void* restrict zone) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  at->tv_sec = now.tv_sec;
  at->tv_usec = now.tv_nsec / 1000;
  return 0;
}

time_t time(time_t* at) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (at) *at = now.tv_sec;
  return now.tv_sec;
}
