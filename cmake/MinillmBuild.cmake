# Targets of the project: one static library per folder, with the device's headers and the warnings of the build.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
find_package(Threads REQUIRED)

add_library(minillm_options INTERFACE)
target_include_directories(minillm_options INTERFACE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/src)
target_compile_options(minillm_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra>)
if(MINILLM_SIM)  # builds to test with: containers check their indices
  target_compile_definitions(minillm_options INTERFACE _GLIBCXX_ASSERTIONS)
endif()

if(MINILLM_SANITIZE)
  string(REPLACE "undefined" "undefined,bounds,alignment" sanitizers "${MINILLM_SANITIZE}")
  # With sanitizers g++ 12 takes members of <regex> for uninitialised.
  add_compile_options(-fsanitize=${sanitizers} -fno-omit-frame-pointer -Wno-maybe-uninitialized)
  add_link_options(-fsanitize=${sanitizers})
  if(MINILLM_SANITIZE MATCHES "undefined")
    add_compile_options(-fno-sanitize-recover=all)
  endif()
endif()

if(MINILLM_MPI)
  find_package(MPI REQUIRED COMPONENTS CXX)
endif()

# The device: the simulated one, or CUDA. Everything that launches or calls the runtime links to minillm_device; cuBLASLt and
# NCCL come with the folders that call them, so that tests of kernels run where neither is installed.
add_library(minillm_device INTERFACE)
add_library(minillm_cublas INTERFACE)
add_library(minillm_nccl INTERFACE)
if(MINILLM_SIM)
  target_link_libraries(minillm_device INTERFACE minillm_sim)
else()
  enable_language(CUDA)
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know that nvcc speaks C++20
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
  endif()
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  find_package(CUDAToolkit REQUIRED)
  find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS} REQUIRED)
  find_library(NCCL_LIBRARY nccl HINTS ${CUDAToolkit_LIBRARY_DIR} REQUIRED)
  target_include_directories(minillm_nccl INTERFACE ${NCCL_INCLUDE_DIR})
  if(NOT MINILLM_SHARED_GPU)  # else src/comm brings MPI in its place
    target_link_libraries(minillm_nccl INTERFACE ${NCCL_LIBRARY})
  endif()
  target_link_libraries(minillm_cublas INTERFACE CUDA::cublasLt)
  target_link_libraries(minillm_device INTERFACE CUDA::cudart)
  target_compile_options(minillm_device INTERFACE
    "$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr;--Werror=all-warnings;-Xptxas=-warn-spills,-warn-lmem-usage>")
endif()

# minillm_library(NAME SOURCES… [LINK TARGETS…]): a folder's library. Names in LINK are folders below it.
function(minillm_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LINK" ${ARGN})
  add_library(minillm_${name} STATIC ${ARG_SOURCES})
  list(TRANSFORM ARG_LINK PREPEND minillm_)
  target_link_libraries(minillm_${name} PUBLIC minillm_options ${ARG_LINK})
endfunction()

# Kernel sources are C++ to the simulated device.
function(minillm_kernel_sources)
  if(MINILLM_SIM)
    set_source_files_properties(${ARGN} PROPERTIES LANGUAGE CXX COMPILE_OPTIONS "-xc++")
  endif()
endfunction()
