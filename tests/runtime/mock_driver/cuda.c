// A driver without a device: module loads and launches succeed and are written to the file that MOCK_CUDA_LOG names, one
// line each: "load cubin" or "load fatbin", "launch NAME grid X Y Z block X Y Z shared BYTES".
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int CUresult;
enum { CUDA_SUCCESS = 0, CUDA_ERROR_NOT_FOUND = 500 };

typedef struct {
  char name[128];
} Function;

typedef struct {
  unsigned grid[3], block[3], shared;
  void* stream;
  void* attributes;
  unsigned count;
} LaunchConfig;

static void Log(const char* format, ...) {
  const char* path = getenv("MOCK_CUDA_LOG");
  FILE* file = path ? fopen(path, "a") : NULL;
  if (file == NULL) return;
  va_list values;
  va_start(values, format);
  vfprintf(file, format, values);
  va_end(values);
  fclose(file);
}

static CUresult Launch(const Function* f, const unsigned* grid, const unsigned* block, unsigned shared) {
  Log("launch %s grid %u %u %u block %u %u %u shared %u\n", f->name, grid[0], grid[1], grid[2], block[0], block[1], block[2],
      shared);
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char** text) { *text = "CUDA_ERROR_MOCK"; return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char** text) { *text = "mock driver"; return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) {
  const char* text = getenv("MOCK_CUDA_VERSION");
  *version = text ? atoi(text) : 13000;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char* name, int size, int device) { snprintf(name, size, "mock"); return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int* value, int attribute, int device) { *value = 0; return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(int* device) { *device = 0; return CUDA_SUCCESS; }

CUresult cuModuleLoadData(void** module, const void* image) {
  const unsigned char* bytes = image;
  // A cubin is an ELF file; a fat binary starts with the magic number 0xba55ed50.
  int elf = memcmp(bytes, "\x7f" "ELF", 4) == 0, fat = memcmp(bytes, "\x50\xed\x55\xba", 4) == 0;
  Log("load %s\n", elf ? "cubin" : fat ? "fatbin" : "unknown");
  static int loaded;
  *module = &loaded;
  return CUDA_SUCCESS;
}
CUresult cuModuleLoadDataEx(void** module, const void* image, unsigned n, void* options, void* values) {
  return cuModuleLoadData(module, image);
}
CUresult cuModuleUnload(void* module) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(Function** f, void* module, const char* name) {
  *f = calloc(1, sizeof(Function));
  strncpy((*f)->name, name, sizeof((*f)->name) - 1);
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(Function* f, int attribute, int value) { return CUDA_SUCCESS; }

CUresult cuLaunchKernel(Function* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                        void* stream, void** arguments, void** extra) {
  const unsigned grid[3] = {gx, gy, gz}, block[3] = {bx, by, bz};
  return Launch(f, grid, block, shared);
}
CUresult cuLaunchCooperativeKernel(Function* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                                   unsigned shared, void* stream, void** arguments) {
  return cuLaunchKernel(f, gx, gy, gz, bx, by, bz, shared, stream, arguments, NULL);
}
CUresult cuLaunchKernelEx(const LaunchConfig* c, Function* f, void** arguments, void** extra) {
  return Launch(f, c->grid, c->block, c->shared);
}
CUresult cuTensorMapEncodeTiled(void* map, int dtype, unsigned rank, void* address, const uint64_t* sizes, const uint64_t* strides,
                                const uint32_t* box, const uint32_t* steps, int interleave, int swizzle, int promotion, int fill) {
  Log("tensormap rank %u dtype %d aligned %d\n", rank, dtype, (int)((uintptr_t)address % 16 == 0));
  memset(map, 0, 128);
  return CUDA_SUCCESS;
}

// TVM's stub wants these to exist; no kernel here calls them.
#define UNSUPPORTED(name) \
  CUresult name(void) { return CUDA_ERROR_NOT_FOUND; }
UNSUPPORTED(cuCtxGetLimit)
UNSUPPORTED(cuCtxSetLimit)
UNSUPPORTED(cuCtxResetPersistingL2Cache)
UNSUPPORTED(cuModuleGetGlobal)
UNSUPPORTED(cuMemsetD32)
UNSUPPORTED(cuStreamSetAttribute)
UNSUPPORTED(cuTensorMapEncodeIm2col)
