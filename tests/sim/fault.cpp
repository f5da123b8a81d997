// sim_fault NAME: one program with a planted fault, or its correct twin. The faults end the process with the
// report that tests/sim/CMakeLists.txt demands; the twins end it with 0 and silence.
#include <cuda_runtime.h>

#include <cstdio>
#include <functional>
#include <map>
#include <string>

#include "kernels/device/launch.h"
#include "kernels/device/ptx.h"
#include "kernels/device/shared.h"

namespace {

using minillm::kernels::dynamic_shared;
using minillm::kernels::launch;
using minillm::kernels::shared;

constexpr int kThreads = 64;

struct Stream {
  Stream() { cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking); }
  ~Stream() { cudaStreamDestroy(handle); }
  cudaStream_t handle = nullptr;
};
struct Event {
  Event() { cudaEventCreateWithFlags(&handle, cudaEventDisableTiming); }
  ~Event() { cudaEventDestroy(handle); }
  cudaEvent_t handle = nullptr;
};
struct Floats {
  explicit Floats(int count) { cudaMalloc(&data, count * sizeof(float)); }
  ~Floats() { cudaFree(data); }
  float* data = nullptr;
};

// --- memory -----------------------------------------------------------------------------------------------

__global__ void fill(float* out, int count, float value) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) out[i] = value;
}
void global_memory(bool fault) {
  Stream stream;
  Floats floats(100);
  launch("fill", fill, {dim3(2), dim3(kThreads), 0, stream.handle}, floats.data, fault ? 101 : 100, 1.0f);
  cudaStreamSynchronize(stream.handle);
}
void freed_memory(bool fault) {
  Stream stream;
  float* kept = nullptr;
  {
    Floats floats(100);
    kept = floats.data;
    if (!fault) launch("fill", fill, {dim3(2), dim3(kThreads), 0, stream.handle}, kept, 100, 1.0f);
  }
  if (fault) launch("fill", fill, {dim3(2), dim3(kThreads), 0, stream.handle}, kept, 100, 1.0f);
  cudaStreamSynchronize(stream.handle);
}

struct Pair {
  float first[48];
  float second[48];
};
__global__ void shared_index(float* out, int index) {
  Pair& pair = shared<Pair>();
  if (threadIdx.x == 0) pair.first[index] = 1.0f;
  if (threadIdx.x == 0) *out = pair.first[index];
}
void shared_array(bool fault) {
  Stream stream;
  Floats floats(1);
  launch("shared_index", shared_index, {dim3(1), dim3(32), 0, stream.handle}, floats.data, fault ? 48 : 47);
  cudaStreamSynchronize(stream.handle);
}
__global__ void shared_end_kernel(float* out, int index) {
  float* all = reinterpret_cast<float*>(&shared<Pair>());
  if (threadIdx.x == 0) all[index] = 1.0f;
  if (threadIdx.x == 0) *out = all[index];
}
void shared_end(bool fault) {
  Stream stream;
  Floats floats(1);
  launch("shared_end", shared_end_kernel, {dim3(1), dim3(32), 0, stream.handle}, floats.data,
         fault ? 96 : 95);
  cudaStreamSynchronize(stream.handle);
}
__global__ void dynamic_index(float* out, int index) {
  float* row = dynamic_shared<float>();
  if (threadIdx.x == 0) row[index] = 1.0f;
  if (threadIdx.x == 0) *out = row[index];
}
void dynamic_array(bool fault) {
  Stream stream;
  Floats floats(1);
  launch("dynamic_index", dynamic_index, {dim3(1), dim3(32), 33 * sizeof(float), stream.handle}, floats.data,
         fault ? 33 : 32);
  cudaStreamSynchronize(stream.handle);
}

__global__ void vector_load(float4* out, const float* in) {
  *out = *reinterpret_cast<const float4*>(in);
}
void vector_alignment(bool fault) {
  Stream stream;
  Floats in(8), out(4);
  launch("vector_load", vector_load, {dim3(1), dim3(1), 0, stream.handle},
         reinterpret_cast<float4*>(out.data), in.data + (fault ? 1 : 4));
  cudaStreamSynchronize(stream.handle);
}

void leak(bool fault) {
  void* memory = nullptr;
  cudaMalloc(&memory, 1234);
  if (!fault) cudaFree(memory);
}

// --- ordering inside a block ------------------------------------------------------------------------------

struct Row {
  float value[kThreads];
};
__global__ void reverse(float* out, const float* in, bool barrier) {
  Row& row = shared<Row>();
  row.value[threadIdx.x] = in[threadIdx.x];
  if (barrier) __syncthreads();
  out[threadIdx.x] = row.value[kThreads - 1 - threadIdx.x];
}
void barrier(bool fault) {
  Stream stream;
  Floats in(kThreads), out(kThreads);
  launch("reverse", reverse, {dim3(1), dim3(kThreads), 0, stream.handle}, out.data, in.data, !fault);
  cudaStreamSynchronize(stream.handle);
}

/// A loop needs a barrier after reading as well: without it the next round's writes overtake slow readers.
__global__ void rotate(float* out, bool second_barrier) {
  Row& row = shared<Row>();
  float value = static_cast<float>(threadIdx.x);
  for (int round = 0; round < 3; ++round) {
    row.value[threadIdx.x] = value;
    __syncthreads();
    value = row.value[(threadIdx.x + 1) % kThreads];
    if (second_barrier) __syncthreads();
  }
  out[threadIdx.x] = value;
}
void second_barrier(bool fault) {
  Stream stream;
  Floats out(kThreads);
  launch("rotate", rotate, {dim3(1), dim3(kThreads), 0, stream.handle}, out.data, !fault);
  cudaStreamSynchronize(stream.handle);
}

/// A shuffle exchanges registers and orders no memory; __syncwarp does.
__global__ void exchange_in_warp(float* out, bool synchronize) {
  Row& row = shared<Row>();
  row.value[threadIdx.x] = 1.0f;
  const float sum = __shfl_xor_sync(~0u, 1.0f, 1);
  if (synchronize) __syncwarp();
  out[threadIdx.x] = sum + row.value[threadIdx.x ^ 1];
}
void warp_memory(bool fault) {
  Stream stream;
  Floats out(32);
  launch("exchange_in_warp", exchange_in_warp, {dim3(1), dim3(32), 0, stream.handle}, out.data, !fault);
  cudaStreamSynchronize(stream.handle);
}

// --- ordering between streams and the host ----------------------------------------------------------------

__global__ void copy(float* out, const float* in, int count) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) out[i] = in[i];
}
void stream_wait(bool fault) {
  Stream communication, compute;
  Event gathered;
  Floats weights(kThreads), out(kThreads);
  launch("fill", fill, {dim3(1), dim3(kThreads), 0, communication.handle}, weights.data, kThreads, 1.0f);
  cudaEventRecord(gathered.handle, communication.handle);
  if (!fault) cudaStreamWaitEvent(compute.handle, gathered.handle);
  launch("copy", copy, {dim3(1), dim3(kThreads), 0, compute.handle}, out.data, weights.data, kThreads);
  cudaDeviceSynchronize();
}

/// The same among a lot of other work: earlier waits between the same streams, memory operations, host
/// synchronisation with a third stream, and an event recorded before the write instead of after it.
void stream_wait_busy(bool fault) {
  Stream communication, compute, other;
  Event early, late;
  Floats weights(kThreads), scratch(kThreads), unrelated(kThreads), out(kThreads);
  for (int i = 0; i < 10; ++i) {
    launch("fill", fill, {dim3(1), dim3(kThreads), 0, communication.handle}, scratch.data, kThreads, 1.0f);
    cudaEventRecord(early.handle, communication.handle);
    cudaStreamWaitEvent(compute.handle, early.handle);
    launch("copy", copy, {dim3(1), dim3(kThreads), 0, compute.handle}, out.data, scratch.data, kThreads);
    cudaEventRecord(late.handle, compute.handle);
    cudaStreamWaitEvent(communication.handle, late.handle);
  }
  cudaEventRecord(early.handle, communication.handle);
  launch("fill", fill, {dim3(1), dim3(kThreads), 0, communication.handle}, weights.data, kThreads, 2.0f);
  cudaEventRecord(late.handle, communication.handle);
  for (int i = 0; i < 20; ++i) {
    cudaMemsetAsync(unrelated.data, 0, kThreads * sizeof(float), other.handle);
    launch("fill", fill, {dim3(1), dim3(kThreads), 0, compute.handle}, out.data, kThreads, 3.0f);
    cudaStreamSynchronize(other.handle);
  }
  cudaStreamWaitEvent(compute.handle, fault ? early.handle : late.handle);
  launch("copy", copy, {dim3(1), dim3(kThreads), 0, compute.handle}, out.data, weights.data, kThreads);
  cudaDeviceSynchronize();
}

/// A slot refilled while it is still read: the reader is first.
void stream_reuse(bool fault) {
  Stream communication, compute;
  Event read;
  Floats weights(kThreads), out(kThreads);
  launch("fill", fill, {dim3(1), dim3(kThreads), 0, compute.handle}, weights.data, kThreads, 1.0f);
  launch("copy", copy, {dim3(1), dim3(kThreads), 0, compute.handle}, out.data, weights.data, kThreads);
  cudaEventRecord(read.handle, compute.handle);
  if (!fault) cudaStreamWaitEvent(communication.handle, read.handle);
  cudaMemsetAsync(weights.data, 0, kThreads * sizeof(float), communication.handle);
  cudaDeviceSynchronize();
}

void host_read(bool fault) {
  Stream stream;
  Event done;
  Floats loss(1);
  float* on_host = nullptr;
  cudaMallocHost(&on_host, sizeof(float));
  *on_host = 0;
  launch("fill", fill, {dim3(1), dim3(1), 0, stream.handle}, loss.data, 1, 1.0f);
  if (fault) cudaEventRecord(done.handle, stream.handle);
  cudaMemcpyAsync(on_host, loss.data, sizeof(float), cudaMemcpyDeviceToHost, stream.handle);
  if (!fault) cudaEventRecord(done.handle, stream.handle);
  cudaEventSynchronize(done.handle);
  const bool lost = *on_host < 0;
  cudaStreamSynchronize(stream.handle);
  if (lost) std::puts("negative");
  cudaFreeHost(on_host);
}

// --- ordering in graphs -----------------------------------------------------------------------------------

struct Graph {
  Graph(cudaStream_t stream, const std::function<void()>& work) {
    cudaGraph_t captured = nullptr;
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
    work();
    cudaStreamEndCapture(stream, &captured);
    cudaGraphInstantiate(&handle, captured, 0);
    cudaGraphDestroy(captured);
  }
  ~Graph() { cudaGraphExecDestroy(handle); }
  cudaGraphExec_t handle = nullptr;
};

/// One branch reads what another writes; it waits for it afterwards only.
void graph_branch(bool fault) {
  Stream communication, compute;
  Event forked, gathered;
  Floats weights(kThreads), out(kThreads);
  const Graph graph(compute.handle, [&] {
    cudaEventRecord(forked.handle, compute.handle);
    cudaStreamWaitEvent(communication.handle, forked.handle);
    launch("fill", fill, {dim3(1), dim3(kThreads), 0, communication.handle}, weights.data, kThreads, 1.0f);
    cudaEventRecord(gathered.handle, communication.handle);
    if (!fault) cudaStreamWaitEvent(compute.handle, gathered.handle);
    launch("copy", copy, {dim3(1), dim3(kThreads), 0, compute.handle}, out.data, weights.data, kThreads);
    cudaStreamWaitEvent(compute.handle, gathered.handle);
  });
  for (int replay = 0; replay < 3; ++replay) cudaGraphLaunch(graph.handle, compute.handle);
  cudaDeviceSynchronize();
}

/// Two graphs that share memory are launched on two streams.
void graph_launches(bool fault) {
  Stream first, second;
  Event launched;
  Floats weights(kThreads), out(kThreads);
  const Graph write(first.handle, [&] { cudaMemsetAsync(weights.data, 0, 4 * kThreads, first.handle); });
  const Graph read(first.handle, [&] {
    launch("copy", copy, {dim3(1), dim3(kThreads), 0, first.handle}, out.data, weights.data, kThreads);
  });
  cudaGraphLaunch(write.handle, first.handle);
  cudaEventRecord(launched.handle, first.handle);
  if (!fault) cudaStreamWaitEvent(second.handle, launched.handle);
  cudaGraphLaunch(read.handle, second.handle);
  cudaDeviceSynchronize();
}

// --- asynchronous copies ----------------------------------------------------------------------------------

struct Stages {
  uint4 word[2][32];
};
/// Two tiles of 32 words through two buffers; the second is under way while the first is read.
__global__ void copy_tiles(uint4* out, const uint4* in, bool wait_for_all) {
  Stages& stages = shared<Stages>();
  const int lane = static_cast<int>(threadIdx.x);
  for (int tile = 0; tile < 2; ++tile) {
    minillm::kernels::copy_async<16>(&stages.word[tile][lane], in + tile * 32 + lane, true);
    minillm::kernels::commit_copies();
  }
  minillm::kernels::wait_copies<1>();
  __syncthreads();
  out[lane] = stages.word[0][lane ^ 1];
  if (wait_for_all) minillm::kernels::wait_copies<0>();
  __syncthreads();
  out[32 + lane] = stages.word[1][lane ^ 1];
}
void copy_wait(bool fault) {
  Stream stream;
  Floats in(4 * 64), out(4 * 64);
  launch("copy_tiles", copy_tiles, {dim3(1), dim3(32), 0, stream.handle}, reinterpret_cast<uint4*>(out.data),
         reinterpret_cast<const uint4*>(in.data), !fault);
  cudaStreamSynchronize(stream.handle);
}

/// A buffer is copied into again while other threads may still read it.
__global__ void reuse_tile(uint4* out, const uint4* in, bool barrier) {
  Stages& stages = shared<Stages>();
  const int lane = static_cast<int>(threadIdx.x);
  for (int tile = 0; tile < 2; ++tile) {
    minillm::kernels::copy_async<16>(&stages.word[0][lane], in + tile * 32 + lane, true);
    minillm::kernels::commit_copies();
    minillm::kernels::wait_copies<0>();
    __syncthreads();
    out[tile * 32 + lane] = stages.word[0][lane ^ 1];
    if (barrier) __syncthreads();
  }
}
void copy_reuse(bool fault) {
  Stream stream;
  Floats in(4 * 64), out(4 * 64);
  launch("reuse_tile", reuse_tile, {dim3(1), dim3(32), 0, stream.handle}, reinterpret_cast<uint4*>(out.data),
         reinterpret_cast<const uint4*>(in.data), !fault);
  cudaStreamSynchronize(stream.handle);
}

/// ldmatrix reads rows that other lanes have written.
__global__ void load_written_rows(uint32_t* out, bool sync) {
  Stages& stages = shared<Stages>();
  const int lane = static_cast<int>(threadIdx.x);
  stages.word[0][lane] = uint4{1, 2, 3, 4};
  if (sync) __syncwarp();
  uint32_t fragment[4];
  minillm::kernels::load_matrices<4>(fragment, &stages.word[0][lane]);
  out[lane] = fragment[0] + fragment[3];
}
void matrix_rows(bool fault) {
  Stream stream;
  Floats out(32);
  launch("load_written_rows", load_written_rows, {dim3(1), dim3(32), 0, stream.handle},
         reinterpret_cast<uint32_t*>(out.data), !fault);
  cudaStreamSynchronize(stream.handle);
}

const std::map<std::string, std::function<void(bool)>>& cases() {
  static const std::map<std::string, std::function<void(bool)>> all = {
      {"global_memory", global_memory},
      {"freed_memory", freed_memory},
      {"shared_array", shared_array},
      {"shared_end", shared_end},
      {"dynamic_array", dynamic_array},
      {"vector_alignment", vector_alignment},
      {"leak", leak},
      {"barrier", barrier},
      {"second_barrier", second_barrier},
      {"warp_memory", warp_memory},
      {"copy_wait", copy_wait},
      {"copy_reuse", copy_reuse},
      {"matrix_rows", matrix_rows},
      {"stream_wait", stream_wait},
      {"stream_wait_busy", stream_wait_busy},
      {"stream_reuse", stream_reuse},
      {"host_read", host_read},
      {"graph_branch", graph_branch},
      {"graph_launches", graph_launches},
  };
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string name = argc == 3 ? argv[1] : "", variant = argc == 3 ? argv[2] : "";
  const auto found = cases().find(name);
  if (found == cases().end() || (variant != "fault" && variant != "correct")) {
    std::fprintf(stderr, "usage: sim_fault CASE fault|correct\n");
    return 2;
  }
  found->second(variant == "fault");
  const cudaError_t code = cudaDeviceSynchronize();
  if (code != cudaSuccess) std::fprintf(stderr, "%s\n", cudaGetErrorString(code));
  return code == cudaSuccess ? 0 : 3;
}
