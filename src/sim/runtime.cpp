// The CUDA runtime API, in terms of Memory and Scheduler.
#include "cuda_runtime.h"

#include <cstdio>
#include <cstring>
#include <vector>

#include "sim/control.h"
#include "sim/counters.h"
#include "sim/device.h"
#include "sim/failure.h"
#include "sim/sanitizer.h"

namespace sim {

Device& device() {
  static Device device;
  return device;
}

namespace {

constexpr size_t kSharedBytesPerBlock = 48 << 10;
constexpr size_t kSharedBytesPerBlockOptin = 227 << 10;
constexpr int kMultiprocessors = 16;
constexpr int kThreadsPerMultiprocessor = 2048;
constexpr int kRuntimeVersion = 13000;
constexpr const char* kBusId = "0000:00:00.0";

Scheduler& scheduler() {
  return device().scheduler;
}

bool valid_shape(dim3 grid, dim3 block) {
  constexpr unsigned kMaxGridX = 0x7fffffff, kMaxGridYZ = 65535;
  return grid.x >= 1 && grid.y >= 1 && grid.z >= 1 && grid.x <= kMaxGridX && grid.y <= kMaxGridYZ &&
         grid.z <= kMaxGridYZ && block.x >= 1 && block.y >= 1 && block.z >= 1 && block.x <= 1024 &&
         block.y <= 1024 && block.z <= 64 && uint64_t{block.x} * block.y * block.z <= 1024;
}

cudaError_t allocate(Memory::Kind kind, void** pointer, size_t bytes) {
  if (pointer == nullptr) return finish(cudaErrorInvalidValue);
  *pointer = nullptr;
  if (bytes == 0 || failure() != cudaSuccess) return finish();
  if (const cudaError_t error = scheduler().check_unsafe_call()) return finish(error);
  *pointer = device().memory.allocate(kind, bytes);
  return finish(*pointer != nullptr ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t release(Memory::Kind kind, void* pointer) {
  if (pointer == nullptr) return finish();
  if (const cudaError_t error = scheduler().check_unsafe_call()) return finish(error);
  scheduler().synchronize_all();
  return finish(device().memory.release(kind, pointer) ? cudaSuccess : cudaErrorInvalidValue);
}

bool direction_fits(cudaMemcpyKind kind, bool target_on_device, bool source_on_device) {
  switch (kind) {
    case cudaMemcpyHostToHost:
      return !target_on_device && !source_on_device;
    case cudaMemcpyHostToDevice:
      return target_on_device && !source_on_device;
    case cudaMemcpyDeviceToHost:
      return !target_on_device && source_on_device;
    case cudaMemcpyDeviceToDevice:
      return target_on_device && source_on_device;
    case cudaMemcpyDefault:
      return true;
  }
  return false;
}

/// memcpy is intercepted by ThreadSanitizer, but not with ignore_noninstrumented_modules=1.
void copy_now(void* target, const void* source, size_t bytes) {
  announce_read(source, bytes);
  announce_write(target, bytes);
  std::memcpy(target, source, bytes);
}

/// `blocking`: cudaMemcpy, which returns when the copy is done.
cudaError_t copy(void* target, const void* source, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream,
                 bool blocking) {
  if (failure() != cudaSuccess || bytes == 0) return finish();
  if (!scheduler().exists(stream)) return finish(cudaErrorInvalidResourceHandle);
  if (target == nullptr || source == nullptr) return finish(cudaErrorInvalidValue);
  const Memory::Range to = device().memory.classify(target, bytes);
  const Memory::Range from = device().memory.classify(source, bytes);
  if (!to.inside || !from.inside) return finish(cudaErrorInvalidValue);
  if (!direction_fits(kind, to.kind == Memory::Kind::kDevice, from.kind == Memory::Kind::kDevice))
    return finish(cudaErrorInvalidMemcpyDirection);
  blocking = blocking || to.kind == Memory::Kind::kPageable;
  const bool staged = from.kind == Memory::Kind::kPageable && !blocking;
  if (blocking || staged)
    if (const cudaError_t error = scheduler().check_host_wait(stream)) return finish(error);
  cudaError_t error = cudaSuccess;
  if (staged) {
    // CUDA stages pageable memory before the call returns: the caller may reuse it at once.
    const auto* begin = static_cast<const std::byte*>(source);
    error = scheduler().enqueue(stream, [target, stage = std::vector<std::byte>(begin, begin + bytes)] {
      copy_now(target, stage.data(), stage.size());
    });
  } else {
    error = scheduler().enqueue(stream, [=] { copy_now(target, source, bytes); });
  }
  if (blocking) scheduler().synchronize(stream);
  return finish(error);
}

}  // namespace

cudaError_t launch(const char* name, dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                   std::function<void()> body) {
  if (failure() != cudaSuccess) return finish();
  if (!scheduler().exists(stream)) return finish(cudaErrorInvalidResourceHandle);
  if (!valid_shape(grid, block) || shared_bytes > kSharedBytesPerBlockOptin)
    return finish(cudaErrorInvalidConfiguration);
  if (const cudaError_t error = scheduler().enqueue_kernel(
          stream, {name, grid, block, shared_bytes, std::move(body), settings().order}))
    return finish(error);
  scheduler().at_launch(stream, [name = std::string(name)] { count_launch(name); });
  return cudaSuccess;  // also when the kernel has already failed: that is for the next call to say
}

}  // namespace sim

using sim::finish;
using sim::scheduler;

// --- device -----------------------------------------------------------------------------------------------

cudaError_t cudaSetDevice(int device) {
  return finish(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return finish();
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return finish();
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device != 0) return finish(cudaErrorInvalidDevice);
  *properties = {};
  std::snprintf(properties->name, sizeof properties->name, "Simulated device");
  properties->totalGlobalMem = static_cast<size_t>(sim::settings().memory_bytes);
  properties->sharedMemPerBlock = sim::kSharedBytesPerBlock;
  properties->sharedMemPerBlockOptin = sim::kSharedBytesPerBlockOptin;
  properties->warpSize = warpSize;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = sim::kThreadsPerMultiprocessor;
  properties->multiProcessorCount = sim::kMultiprocessors;
  properties->major = sim::settings().compute_capability / 10;
  properties->minor = sim::settings().compute_capability % 10;
  properties->l2CacheSize = 32 << 20;
  properties->memoryBusWidth = 512;
  return finish();
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp properties;
  if (const cudaError_t error = cudaGetDeviceProperties(&properties, device)) return error;
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
      *value = properties.maxThreadsPerBlock;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = static_cast<int>(properties.sharedMemPerBlock);
      break;
    case cudaDevAttrWarpSize:
      *value = properties.warpSize;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = properties.multiProcessorCount;
      break;
    case cudaDevAttrGlobalMemoryBusWidth:
      *value = properties.memoryBusWidth;
      break;
    case cudaDevAttrL2CacheSize:
      *value = properties.l2CacheSize;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = properties.maxThreadsPerMultiProcessor;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = properties.major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = properties.minor;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(properties.sharedMemPerBlockOptin);
      break;
    default:
      return finish(cudaErrorInvalidValue);
  }
  return finish();
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device) {
  if (device != 0) return finish(cudaErrorInvalidDevice);
  const int needed = std::snprintf(id, static_cast<size_t>(length), "%s", sim::kBusId);
  return finish(needed < length ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaDeviceGetByPCIBusId(int* device, const char* id) {
  *device = 0;
  return finish(std::strcmp(id, sim::kBusId) == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = 0;  // there is no second device
  return finish(device == 0 && peer == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}

cudaError_t cudaDeviceSynchronize() {
  if (const cudaError_t error = scheduler().check_host_wait()) return finish(error);
  scheduler().synchronize_all();
  return finish();
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = sim::kRuntimeVersion;
  return finish();
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  return cudaDriverGetVersion(version);
}

// --- memory -----------------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  return sim::allocate(sim::Memory::Kind::kDevice, pointer, bytes);
}
cudaError_t cudaFree(void* pointer) {
  return sim::release(sim::Memory::Kind::kDevice, pointer);
}
cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
  return sim::allocate(sim::Memory::Kind::kPinned, pointer, bytes);
}
cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  return cudaMallocHost(pointer, bytes);
}
cudaError_t cudaFreeHost(void* pointer) {
  return sim::release(sim::Memory::Kind::kPinned, pointer);
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  const int64_t capacity = sim::settings().memory_bytes;
  *total = static_cast<size_t>(capacity);
  *free = static_cast<size_t>(max(int64_t{0}, capacity - sim::device().memory.device_bytes()));
  return finish();
}

cudaError_t cudaMemcpy(void* target, const void* source, size_t bytes, cudaMemcpyKind kind) {
  return sim::copy(target, source, bytes, kind, nullptr, true);
}

cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return sim::copy(target, source, bytes, kind, stream, false);
}

cudaError_t cudaMemset(void* target, int value, size_t bytes) {
  if (const cudaError_t error = scheduler().check_unsafe_call()) return finish(error);
  return cudaMemsetAsync(target, value, bytes);
}

cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes, cudaStream_t stream) {
  if (sim::failure() != cudaSuccess || bytes == 0) return finish();
  if (!scheduler().exists(stream)) return finish(cudaErrorInvalidResourceHandle);
  const auto range = sim::device().memory.classify(target, bytes);
  if (range.kind == sim::Memory::Kind::kPageable || !range.inside) return finish(cudaErrorInvalidValue);
  return finish(scheduler().enqueue(stream, [=] {
    sim::announce_write(target, bytes);
    std::memset(target, value, bytes);
  }));
}

// --- streams ----------------------------------------------------------------------------------------------

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return finish();
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  if (flags != cudaStreamDefault && flags != cudaStreamNonBlocking) return finish(cudaErrorInvalidValue);
  *stream = scheduler().create_stream(flags);
  return finish();
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  if (stream == nullptr || !scheduler().exists(stream)) return finish(cudaErrorInvalidResourceHandle);
  scheduler().destroy_stream(stream);
  return finish();
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (!scheduler().exists(stream)) return finish(cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = scheduler().check_host_wait(stream)) return finish(error);
  scheduler().synchronize(stream);
  return finish();
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (!scheduler().exists(stream)) return finish(cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = scheduler().check_host_wait(stream)) return finish(error);
  // "Not ready" is an answer, no error to remember.
  if (!scheduler().query(stream)) return cudaErrorNotReady;
  return finish();
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  if (!scheduler().exists(stream) || !scheduler().exists(event))
    return finish(cudaErrorInvalidResourceHandle);
  if (flags > cudaEventWaitExternal) return finish(cudaErrorInvalidValue);
  return finish(scheduler().wait_on_stream(stream, event, flags == cudaEventWaitExternal));
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  if (!scheduler().exists(stream)) return finish(cudaErrorInvalidResourceHandle);
  if (function == nullptr) return finish(cudaErrorInvalidValue);
  if (sim::failure() != cudaSuccess) return finish();
  if (const cudaError_t error = scheduler().enqueue(stream, [=] { function(argument); }))
    return finish(error);
  return cudaSuccess;  // as launch()
}

// --- events -----------------------------------------------------------------------------------------------

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  if ((flags & ~(cudaEventBlockingSync | cudaEventDisableTiming)) != 0) return finish(cudaErrorInvalidValue);
  *event = scheduler().create_event(flags);
  return finish();
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  if (!scheduler().exists(event)) return finish(cudaErrorInvalidResourceHandle);
  scheduler().destroy_event(event);
  return finish();
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  if (!scheduler().exists(stream) || !scheduler().exists(event))
    return finish(cudaErrorInvalidResourceHandle);
  if (flags > cudaEventRecordExternal) return finish(cudaErrorInvalidValue);
  return finish(scheduler().record(event, stream, flags == cudaEventRecordExternal));
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (!scheduler().exists(event)) return finish(cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = scheduler().check_host_wait(event)) return finish(error);
  scheduler().synchronize(event);
  return finish();
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (!scheduler().exists(event)) return finish(cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = scheduler().check_host_wait(event)) return finish(error);
  if (!scheduler().query(event)) return cudaErrorNotReady;
  return finish();
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  for (cudaEvent_t event : {start, end})
    if (!scheduler().exists(event) || event->mark == nullptr || (event->flags & cudaEventDisableTiming) != 0)
      return finish(cudaErrorInvalidResourceHandle);
  for (cudaEvent_t event : {start, end})
    if (!scheduler().query(event)) return cudaErrorNotReady;
  const auto elapsed = scheduler().reached(end) - scheduler().reached(start);
  *milliseconds = std::chrono::duration<float, std::milli>(elapsed).count();
  return finish();
}
