// A driver of CUDA in main memory. A module is the path of a shared library, whose functions run_NAME run kernels.
// It logs its calls, counts what is not released, and fails on demand.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { INVALID = 1, OUT_OF_MEMORY = 2, NOT_FOUND = 500 };
static char calls[1 << 16], failing[64];
static int failure, pools = 1, current, live_memory, live_modules;
static size_t total = 1 << 28, used;

static int lost;  // the code of all calls after a device was lost; -1: the next failure loses it
void stub_reset(void) { calls[0] = failing[0] = 0; failure = lost = 0; }
void stub_fail(const char *name, int code, int stays) {
  snprintf(failing, sizeof failing, "%s", name);
  failure = code, lost = -stays;
}
void stub_set(int has_pools, size_t memory) { pools = has_pools, total = memory; }
const char *stub_calls(void) { return calls; }
int stub_live_memory(void) { return live_memory; }
int stub_live_modules(void) { return live_modules; }
size_t stub_used(void) { return used; }

static int called(const char *name) {
  size_t length = strlen(calls);
  if (length + 64 < sizeof calls) snprintf(calls + length, 64, "%s\n", name);
  if (lost > 0) return lost;
  if (failure && !strcmp(name, failing)) {
    int code = failure;
    if (lost < 0) lost = code; else failure = 0;
    return code;
  }
  return 0;
}
#define CALLED do { int code = called(__func__); if (code) return code; } while (0)
#define NEEDS_CONTEXT do { CALLED; if (!current) return 201; } while (0)

int cuInit(unsigned flags) { CALLED; return flags ? INVALID : 0; }
int cuDriverGetVersion(int *version) { CALLED; *version = 12090; return 0; }
int cuGetErrorName(int code, const char **text) {
  *text = code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : NULL;
  return *text ? 0 : INVALID;
}
int cuGetErrorString(int code, const char **text) {
  *text = code == OUT_OF_MEMORY ? "out of memory" : code == 700 ? "an illegal memory access was encountered" : NULL;
  return *text ? 0 : INVALID;
}
int cuDeviceGetCount(int *count) { CALLED; *count = 2; return 0; }
int cuDeviceGetName(char *text, int size, int device) { CALLED; snprintf(text, size, "Stub %d", device); return 0; }
int cuDeviceTotalMem_v2(size_t *size, int device) { CALLED; *size = total; return 0; }
int cuDeviceGetAttribute(int *value, int number, int device) {
  CALLED;
  switch (number) {
    case 1: *value = 1024; break;
    case 8: *value = 48 << 10; break;
    case 75: *value = 8; break;
    case 76: *value = device ? 9 : 0; break;
    case 115: *value = pools; break;
    default: return INVALID;
  }
  return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { CALLED; *context = (void *)(intptr_t)(device + 1); return 0; }
int cuCtxSetCurrent(void *context) { current = context != NULL; return lost > 0 ? lost : 0; }
int cuStreamCreate(void **stream, unsigned flags) { NEEDS_CONTEXT; *stream = (void *)&failure; return 0; }
int cuStreamSynchronize(void *stream) { NEEDS_CONTEXT; return 0; }
int cuDeviceGetDefaultMemPool(void **pool, int device) { CALLED; *pool = (void *)&pools; return 0; }
int cuMemPoolSetAttribute(void *pool, int number, void *value) { CALLED; return number == 4 ? 0 : INVALID; }

static int reserve(uint64_t *address, size_t size) {
  if (used + size > total) return OUT_OF_MEMORY;
  size_t *memory = malloc(size + 64);
  memory[0] = size;
  memset(memory + 8, 0xa5, size);
  *address = (uint64_t)(uintptr_t)(memory + 8);
  used += size, live_memory++;
  return 0;
}
static int release(uint64_t address) {
  size_t *memory = (size_t *)(uintptr_t)address - 8;
  used -= memory[0], live_memory--;
  memset(memory + 8, 0x5a, memory[0]);
  free(memory);
  return 0;
}
int cuMemAllocAsync(uint64_t *address, size_t size, void *stream) { NEEDS_CONTEXT; return reserve(address, size); }
int cuMemAlloc_v2(uint64_t *address, size_t size) { NEEDS_CONTEXT; return reserve(address, size); }
int cuMemFreeAsync(uint64_t address, void *stream) { NEEDS_CONTEXT; return release(address); }
int cuMemFree_v2(uint64_t address) { NEEDS_CONTEXT; return release(address); }
#define AT(address) ((void *)(uintptr_t)(address))
int cuMemcpyHtoDAsync_v2(uint64_t target, const void *source, size_t size, void *stream) {
  NEEDS_CONTEXT;
  memcpy(AT(target), source, size);
  return 0;
}
int cuMemcpyDtoHAsync_v2(void *target, uint64_t source, size_t size, void *stream) {
  NEEDS_CONTEXT;
  memcpy(target, AT(source), size);
  return 0;
}
int cuMemcpyDtoDAsync_v2(uint64_t target, uint64_t source, size_t size, void *stream) {
  NEEDS_CONTEXT;
  memcpy(AT(target), AT(source), size);
  return 0;
}
int cuModuleLoadData(void **module, const char *path) {
  NEEDS_CONTEXT;
  *module = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!*module) fprintf(stderr, "%s\n", dlerror());
  live_modules += *module != NULL;
  return *module ? 0 : INVALID;
}
int cuModuleUnload(void *module) { NEEDS_CONTEXT; live_modules--; dlclose(module); return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
  NEEDS_CONTEXT;
  char symbol[512];
  snprintf(symbol, sizeof symbol, "run_%s", name);
  *function = dlsym(module, symbol);
  return *function ? 0 : NOT_FOUND;
}
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned ty, unsigned tz,
                   unsigned shared, void *stream, void **parameters, void **extra) {
  NEEDS_CONTEXT;
  if (y != 1 || z != 1 || ty != 1 || tz != 1 || extra || threads > 1024) return INVALID;
  ((void (*)(void **, unsigned, unsigned))function)(parameters, x, threads);
  return 0;
}
