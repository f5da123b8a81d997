// Stand-in for NCCL: collectives over MPI, under the names and values of the vendor's header (2.28). The
// version that ncclGetVersion tells is that of a library without known faults, or what a test wants
// (sim/control.h).
//
// Built without MPI (MINILLM_WITH_MPI not defined) only communicators of one rank exist. With MPI, which has
// to provide MPI_THREAD_MULTIPLE, a communicator spans any ranks of MPI_COMM_WORLD in any order; those of
// several ranks are created by all ranks of MPI_COMM_WORLD at the same time, each in exactly one. Sums of
// fp32 and bf16 add in rank order in fp32 and are rounded once: the same bits on every run and, for
// all-reduce, every rank. A collective that differs between ranks in order, count, type, root or place in the
// symmetric windows is an asynchronous error of the communicator on all ranks whose text (ncclGetLastError)
// says what each rank, named as in MPI_COMM_WORLD, called; its result is NaN.
#pragma once

#include <cuda_runtime.h>
#include <limits.h>

#include <cstddef>

#define NCCL_MAJOR 2
#define NCCL_MINOR 28
#define NCCL_PATCH 9
#define NCCL_VERSION(X, Y, Z) ((X)*10000 + (Y)*100 + (Z))
#define NCCL_VERSION_CODE NCCL_VERSION(NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH)
#define NCCL_UNIQUE_ID_BYTES 128
#define NCCL_CONFIG_UNDEF_INT INT_MIN
#define NCCL_CONFIG_UNDEF_PTR NULL
#define NCCL_WIN_DEFAULT 0x00
#define NCCL_WIN_COLL_SYMMETRIC 0x01
#define NCCL_WIN_REQUIRED_ALIGNMENT 4096
#define NCCL_CTA_POLICY_DEFAULT 0x00
#define NCCL_CTA_POLICY_EFFICIENCY 0x01
#define NCCL_CTA_POLICY_ZERO 0x02

extern "C" {

typedef struct ncclComm* ncclComm_t;
typedef struct ncclWindow_vidmem* ncclWindow_t;
typedef struct {
  char internal[NCCL_UNIQUE_ID_BYTES];
} ncclUniqueId;

typedef enum {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7,
  ncclNumResults = 8,
} ncclResult_t;

typedef enum { ncclSum = 0, ncclProd = 1, ncclMax = 2, ncclMin = 3, ncclAvg = 4 } ncclRedOp_t;

typedef enum {
  ncclInt8 = 0,
  ncclUint8 = 1,
  ncclInt32 = 2,
  ncclUint32 = 3,
  ncclInt64 = 4,
  ncclUint64 = 5,
  ncclFloat16 = 6,
  ncclFloat32 = 7,
  ncclFloat64 = 8,
  ncclBfloat16 = 9,
} ncclDataType_t;

/// Only commName has a meaning here; blocking, maxCTAs and CTAPolicy are checked and recorded for tests
/// (sim/counters.h), the other fields tune the real library.
typedef struct {
  size_t size;
  unsigned int magic;
  unsigned int version;
  int blocking;
  int cgaClusterSize;
  int minCTAs;
  int maxCTAs;
  const char* netName;
  int splitShare;
  int trafficClass;
  const char* commName;
  int collnetEnable;
  int CTAPolicy;
  int shrinkShare;
  int nvlsCTAs;
  int nChannelsPerNetPeer;
  int nvlinkCentricSched;
} ncclConfig_t;

#define NCCL_CONFIG_INITIALIZER                                                                        \
  {                                                                                                    \
    sizeof(ncclConfig_t), 0xcafebeef, NCCL_VERSION_CODE, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, \
        NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_PTR, NCCL_CONFIG_UNDEF_INT,    \
        NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_PTR, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT,    \
        NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT     \
  }

/// Device memory that can be registered. Where the device is simulated it is exactly as large as asked for,
/// but at least NCCL_WIN_REQUIRED_ALIGNMENT bytes; on CUDA at least 2 MiB.
ncclResult_t ncclMemAlloc(void** ptr, size_t size);
/// ncclInvalidUsage, and the memory stays, while it is registered.
ncclResult_t ncclMemFree(void* ptr);

ncclResult_t ncclGetVersion(int* version);
ncclResult_t ncclGetUniqueId(ncclUniqueId* uniqueId);
const char* ncclGetErrorString(ncclResult_t result);
/// The communicator's asynchronous error if it has one, else the calling thread's last failed call.
const char* ncclGetLastError(ncclComm_t comm);

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank);
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank,
                                    ncclConfig_t* config);
/// Waits for the collectives issued so far.
ncclResult_t ncclCommFinalize(ncclComm_t comm);
/// ncclInvalidUsage, though the communicator is destroyed, when windows are registered with it.
ncclResult_t ncclCommDestroy(ncclComm_t comm);
/// Like destroy, but collectives that wait for other ranks end at once, unfinished.
ncclResult_t ncclCommAbort(ncclComm_t comm);
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* asyncError);
ncclResult_t ncclCommCount(const ncclComm_t comm, int* count);
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank);

/// Collective, and waits for the device. ncclInvalidArgument on all ranks when on one of them the range is
/// not memory of one ncclMemAlloc from a multiple of NCCL_WIN_REQUIRED_ALIGNMENT on, or overlaps a window of
/// the communicator, and when sizes or flags differ between ranks.
///
/// NCCL_WIN_COLL_SYMMETRIC promises that a collective's buffer in the window has the same offset on all ranks
/// (in place: the whole buffer has). A broken promise is an asynchronous error that names the offsets.
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* buff, size_t size, ncclWindow_t* win,
                                    int winFlags);
/// Local: no rank may be using the memory in a collective.
ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win);

ncclResult_t ncclAllGather(const void* sendbuff, void* recvbuff, size_t sendcount, ncclDataType_t datatype,
                           ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclReduceScatter(const void* sendbuff, void* recvbuff, size_t recvcount,
                               ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclAllReduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclBroadcast(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                           int root, ncclComm_t comm, cudaStream_t stream);

/// The collectives of a group are issued by the outermost ncclGroupEnd, in call order. It returns the first
/// error of the group's calls and issues nothing then; ncclInvalidUsage when one collective writes what
/// another of the group reads or writes, since the real library runs them at the same time.
ncclResult_t ncclGroupStart();
ncclResult_t ncclGroupEnd();

}  // extern "C"
