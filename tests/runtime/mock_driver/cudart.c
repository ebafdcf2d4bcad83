// The runtime API's part of the mock: one device, nothing ever fails.
#include <stddef.h>

static int current;

int cudaGetDeviceCount(int* count) { *count = 1; return 0; }
int cudaSetDevice(int device) { current = device; return 0; }
int cudaGetDevice(int* device) { *device = current; return 0; }
int cudaGetLastError(void) { return 0; }
int cudaPeekAtLastError(void) { return 0; }
const char* cudaGetErrorString(int error) { return "mock runtime"; }
int cudaDeviceGetAttribute(int* value, int attribute, int device) { *value = 0; return 0; }
int cudaStreamSynchronize(void* stream) { return 0; }
