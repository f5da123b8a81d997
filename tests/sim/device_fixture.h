// What the tests of the simulated device share.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kernels/device/launch.h"
#include "sim/control.h"

namespace minillm {

/// Device memory that holds `count` values and is freed with it.
template <class T>
class Array {
 public:
  explicit Array(size_t count) : count_(count) {
    if (cudaMalloc(&data_, count * sizeof(T)) != cudaSuccess) throw std::bad_alloc();
  }
  explicit Array(const std::vector<T>& values) : Array(values.size()) {
    cudaMemcpy(data_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice);
  }
  ~Array() { cudaFree(data_); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  T* get() const { return data_; }
  std::vector<T> read() const {
    std::vector<T> values(count_);
    cudaMemcpy(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost);
    return values;
  }

 private:
  T* data_ = nullptr;
  size_t count_ = 0;
};

/// A non-blocking stream of its own; the settings are back to their defaults after each test.
class DeviceTest : public ::testing::Test {
 protected:
  DeviceTest() { cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking); }
  ~DeviceTest() override {
    cudaStreamDestroy(stream_);
    sim::clear_failure();
    sim::set_order("forward");
  }

  /// The text of the failure that the work on the stream ends with; empty when there is none.
  std::string failure_of_stream() {
    const cudaError_t code = cudaStreamSynchronize(stream_);
    return code == cudaSuccess ? "" : cudaGetErrorString(code);
  }
  kernels::LaunchShape shape(dim3 grid, dim3 block, size_t shared_bytes = 0) const {
    return {grid, block, shared_bytes, stream_};
  }

  cudaStream_t stream_ = nullptr;
};

}  // namespace minillm
