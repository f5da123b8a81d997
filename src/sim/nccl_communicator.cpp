#include "sim/nccl_communicator.h"

#include <algorithm>
#include <cstring>

#include "sim/nccl_reduce.h"
#if !defined(CUDART_VERSION)  // the simulated device
#include "sim/control.h"
#endif

using nccl_over_mpi::Call;
using nccl_over_mpi::check;
using nccl_over_mpi::Collective;
using nccl_over_mpi::Extent;
using nccl_over_mpi::extent_of;
using nccl_over_mpi::Failure;
using nccl_over_mpi::size_of;

#if defined(__SANITIZE_THREAD__)
extern "C" {
void __tsan_read_range(void*, unsigned long);
void __tsan_write_range(void*, unsigned long);
void AnnotateIgnoreReadsBegin(const char*, int);
void AnnotateIgnoreReadsEnd(const char*, int);
void AnnotateIgnoreWritesBegin(const char*, int);
void AnnotateIgnoreWritesEnd(const char*, int);
void AnnotateIgnoreSyncBegin(const char*, int);
void AnnotateIgnoreSyncEnd(const char*, int);
}
#endif

namespace {

/// Shows ThreadSanitizer a host function as one read and one write of the staging memory, what MPI accesses.
/// Its inside stays hidden: it orders no streams, and its stack may be the host's.
class AnnouncedScope {
 public:
#if defined(__SANITIZE_THREAD__)
  AnnouncedScope(void* read, int64_t read_bytes, void* written, int64_t written_bytes) {
    __tsan_read_range(read, static_cast<unsigned long>(read_bytes));
    __tsan_write_range(written, static_cast<unsigned long>(written_bytes));
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
    AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
  }
  ~AnnouncedScope() {
    AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
#else
  AnnouncedScope(void*, int64_t, void*, int64_t) {}
  ~AnnouncedScope() {}
#endif
  AnnouncedScope(const AnnouncedScope&) = delete;
  AnnouncedScope& operator=(const AnnouncedScope&) = delete;
};

/// The calling thread's capture mode is relaxed while it lives.
class AllowedUnsafeCalls {
 public:
  AllowedUnsafeCalls() {
    check(cudaThreadExchangeStreamCaptureMode(&mode_), "cudaThreadExchangeStreamCaptureMode");
  }
  ~AllowedUnsafeCalls() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  AllowedUnsafeCalls(const AllowedUnsafeCalls&) = delete;
  AllowedUnsafeCalls& operator=(const AllowedUnsafeCalls&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

#if defined(CUDART_VERSION)
int64_t buffer_bytes() {
  return 0;
}
#else
int64_t buffer_bytes() {
  return sim::settings().nccl_buffer_bytes;
}
#endif

/// What a rank registers, sent between processes as bytes.
struct Registration {
  int64_t bytes;
  int64_t flags;
};

}  // namespace

ncclComm::ncclComm(std::string name, int nranks, int rank, const ncclUniqueId& id)
    : name_(std::move(name)), rank_(rank), size_(nranks), windows_(name_) {
  if (nranks == 1) return;
  transport_ = nccl_over_mpi::make_transport(nranks, rank, id);
  if (const int64_t bytes = buffer_bytes(); bytes > 0) {
    void* data = nullptr;
    check(cudaMalloc(&data, bytes), "cudaMalloc of NCCL's buffers");
    buffers_.reset(static_cast<std::byte*>(data));
  }
}

ncclComm::~ncclComm() = default;

ncclWindow_t ncclComm::register_window(const void* buffer, int64_t bytes, int flags) {
  wait();  // the transport serves one thread at a time, and collectives may be running
  require_no_error();
  const auto require = [this](const std::string& fault) {
    if (!fault.empty()) throw Failure(ncclInvalidArgument, "communicator " + name_ + ": " + fault);
  };
  require(windows_.refusal(buffer, bytes, flags));  // the other ranks wait, as in NCCL
  if (transport_) require(registration_fault(bytes, flags));
  return windows_.add(buffer, bytes, flags);
}

std::string ncclComm::registration_fault(int64_t bytes, int flags) {
  const Registration mine{bytes, flags};
  std::vector<Registration> all(size_);
  transport_->all_gather(&mine, all.data(), sizeof mine, 1);
  const auto world_rank = [&](int r) { return "rank " + std::to_string(transport_->world_ranks()[r]); };
  const auto text = [](const Registration& r) {
    return std::to_string(r.bytes) + " bytes with flags " + std::to_string(r.flags);
  };
  for (int r = 1; r < size_; ++r)
    if (all[r].bytes != all[0].bytes || all[r].flags != all[0].flags)
      return world_rank(0) + " registers a window of " + text(all[0]) + ", " + world_rank(r) + " one of " +
             text(all[r]) + ": they have to be the same";
  return "";
}

Call ncclComm::placed(Call call, const void* send, const void* receive) const {
  const Extent extent = extent_of(call, size_, rank_);
  const int64_t element = size_of(static_cast<ncclDataType_t>(call.type));
  call.send = windows_.find(send, extent.sent * element);
  call.receive = windows_.find(receive, extent.received * element);
  // In place, where this rank's piece lies follows from where the whole lies.
  const int64_t piece = rank_ * call.count * element;
  const auto* from = static_cast<const std::byte*>(send);
  const auto* to = static_cast<const std::byte*>(receive);
  if (call.collective == Collective::kAllGather && from == to + piece) call.send = call.receive;
  if (call.collective == Collective::kReduceScatter && to == from + piece) call.receive = call.send;
  return call;
}

void ncclComm::require_no_error() const {
  if (const ncclResult_t error = asynchronous_error(); error != ncclSuccess)
    throw Failure(error, error_text());
}

void ncclComm::issue(const Call& call, const void* send, void* receive, cudaStream_t stream) {
  require_no_error();
  if (size_ == 1) return copy_for_one_rank(call, send, receive, stream);
  const Extent extent = extent_of(call, size_, rank_);
  const int64_t element = size_of(static_cast<ncclDataType_t>(call.type));
  const Operation& operation = operation_for(call);
  order_.begin(stream);
  if (extent.sent > 0)
    check(cudaMemcpyAsync(operation.send, send, extent.sent * element, cudaMemcpyDeviceToHost, stream),
          "cudaMemcpyAsync to staging");
  check(cudaLaunchHostFunc(stream, run, const_cast<Operation*>(&operation)), "cudaLaunchHostFunc");
  if (extent.received > 0)
    check(
        cudaMemcpyAsync(receive, operation.result, extent.received * element, cudaMemcpyHostToDevice, stream),
        "cudaMemcpyAsync from staging");
  order_.end(stream);
}

void ncclComm::copy_for_one_rank(const Call& call, const void* send, void* receive, cudaStream_t stream) {
  const int64_t bytes = call.count * size_of(static_cast<ncclDataType_t>(call.type));
  if (bytes > 0 && send != receive)
    check(cudaMemcpyAsync(receive, send, bytes, cudaMemcpyDeviceToDevice, stream), "cudaMemcpyAsync");
}

ncclComm::Operation& ncclComm::operation_for(const Call& call) {
  const int64_t bytes =
      extent_of(call, size_, rank_).staged * size_of(static_cast<ncclDataType_t>(call.type));
  if (staging_.empty() || bytes > staging_bytes_) grow_staging(bytes);
  std::unique_ptr<Operation>& slot = operations_[call];
  if (!slot) {
    std::byte* send = staging_[staging_.size() - 2].get();
    std::byte* receive = staging_.back().get();
    // The sum of a reduce-scatter overwrites what was sent; a broadcast has one buffer.
    const bool in_send =
        call.collective == Collective::kReduceScatter || call.collective == Collective::kBroadcast;
    slot.reset(new Operation{this, call, send, receive, in_send ? send : receive});
  }
  return *slot;
}

void ncclComm::grow_staging(int64_t bytes) {
  // Doubling bounds what the smaller buffers, which queued and captured operations still name, add up to.
  const int64_t grown = std::max({bytes, 2 * staging_bytes_, int64_t{4096}});
  // Staging memory belongs to no graph: a capture of the calling thread must not forbid to allocate it.
  const AllowedUnsafeCalls allowed;
  for (int i = 0; i < 2; ++i) {
    void* data = nullptr;
    check(cudaMallocHost(&data, grown), "cudaMallocHost of staging memory");
    staging_.emplace_back(static_cast<std::byte*>(data));
  }
  staging_bytes_ = grown;
}

void ncclComm::run(void* argument) {
  const Operation& operation = *static_cast<Operation*>(argument);
  ncclComm& self = *operation.communicator;
  const Extent extent = extent_of(operation.call, self.size_, self.rank_);
  const int64_t element = size_of(static_cast<ncclDataType_t>(operation.call.type));
  const AnnouncedScope announced(operation.send, extent.sent * element, operation.result,
                                 extent.received * element);
  try {
    self.require_no_error();
    self.compare_calls(operation.call);
    self.move_data(operation);
  } catch (const Failure& failure) {
    self.fail(failure.code(), failure.what());
  } catch (const std::exception& error) {
    self.fail(ncclInternalError, error.what());
  }
  // The copies that follow on the stream cannot be taken back: let them carry NaN rather than old values.
  if (self.asynchronous_error() != ncclSuccess)
    std::memset(operation.result, 0xff, extent.received * element);
}

void ncclComm::compare_calls(Call call) {
  call.sequence = ++sequence_;
  std::vector<Call> calls(size_);
  transport_->all_gather(&call, calls.data(), sizeof(Call), 1);
  const std::string mismatch = nccl_over_mpi::describe_mismatch(name_, calls, transport_->world_ranks());
  if (!mismatch.empty()) throw Failure(ncclInvalidUsage, mismatch);
}

void ncclComm::move_data(const Operation& operation) {
  const Call& call = operation.call;
  const ncclDataType_t type = static_cast<ncclDataType_t>(call.type);
  const int64_t element = size_of(type);
  if (call.count == 0) return;
  switch (call.collective) {
    case Collective::kAllGather:
      return transport_->all_gather(operation.send, operation.receive, call.count, element);
    case Collective::kReduceScatter:
      transport_->all_to_all(operation.send, operation.receive, call.count, element);
      return nccl_over_mpi::sum_in_rank_order(type, operation.receive, size_, call.count, operation.send);
    case Collective::kBroadcast:
      return transport_->broadcast(operation.send, call.count, element, call.root);
    case Collective::kAllReduce: {
      // Each rank adds one piece for all, so that all ranks hold the same bits.
      const int64_t padded = extent_of(call, size_, rank_).staged, piece = padded / size_;
      std::memset(operation.send + call.count * element, 0, (padded - call.count) * element);
      transport_->all_to_all(operation.send, operation.receive, piece, element);
      nccl_over_mpi::sum_in_rank_order(type, operation.receive, size_, piece, operation.send);
      return transport_->all_gather(operation.send, operation.receive, piece, element);
    }
  }
}

void ncclComm::wait() {
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

void ncclComm::wait_for_peers() {
  if (!transport_ || asynchronous_error() != ncclSuccess) return;
  const char here = 0;
  std::vector<char> all(size_);
  transport_->all_gather(&here, all.data(), 1, 1);
}

void ncclComm::abort() {
  if (transport_) transport_->abort();
}

// Host functions of one communicator run one at a time, so the first failure is the only writer.
void ncclComm::fail(ncclResult_t code, const std::string& text) {
  if (error_.load(std::memory_order_relaxed) != ncclSuccess) return;
  error_text_ = text;
  error_.store(code, std::memory_order_release);
}

ncclResult_t ncclComm::asynchronous_error() const {
  if (error_.load(std::memory_order_relaxed) == ncclSuccess) return ncclSuccess;
  return error_.load(std::memory_order_acquire);
}

const char* ncclComm::error_text() const {
  return error_text_.c_str();
}
