# Tests: GoogleTest programs, run alone or under mpirun, and scripts.
include(GoogleTest)

if(MINILLM_SANITIZE MATCHES "thread")
  # MPI and oneDNN are not instrumented; what they read and write is announced by the stand-ins.
  set(MINILLM_TEST_ENVIRONMENT "TSAN_OPTIONS=ignore_noninstrumented_modules=1 halt_on_error=1 second_deadlock_stack=1 atexit_sleep_ms=0")
elseif(MINILLM_SANITIZE MATCHES "address")
  # Leaks of device memory are found by the simulated device; the launcher's libraries leak host memory at exit.
  set(MINILLM_TEST_ENVIRONMENT "ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=0")
else()
  set(MINILLM_TEST_ENVIRONMENT "")
endif()

# Ranks that distributed tests run with. Sanitizers look at accesses and their order, which show with two and three.
set(MINILLM_TEST_RANKS 1 2 3 4)
if(NOT MINILLM_MPI)
  set(MINILLM_TEST_RANKS 1)
elseif(MINILLM_SANITIZE MATCHES "thread")
  set(MINILLM_TEST_RANKS 2)
elseif(MINILLM_SANITIZE)
  set(MINILLM_TEST_RANKS 2 3)
endif()

# -O1: what takes time when tests run is in the libraries, and full optimisation of GoogleTest's macros takes a compiler
# half as long again. AddressSanitizer's builds spend half of their time on what tests themselves do with values, where it
# has little to find.
set(MINILLM_TEST_OPTIONS -O1)
if(MINILLM_SANITIZE MATCHES "undefined")
  set(MINILLM_TEST_OPTIONS -O0 -fno-sanitize=undefined,bounds,alignment)
endif()

# minillm_launcher(VARIABLE N): what starts a program on N ranks; nothing without MPI, where N is 1.
function(minillm_launcher variable ranks)
  set(${variable} "" PARENT_SCOPE)
  if(MINILLM_MPI)
    set(${variable} ${PROJECT_SOURCE_DIR}/scripts/mpirun.sh -np ${ranks} PARENT_SCOPE)
  endif()
endfunction()

# minillm_test(NAME SOURCES… LINK TARGETS… [RANKS N…] [TIMEOUT SECONDS]): a GoogleTest program. Without RANKS it runs
# once per test case; with RANKS the whole program runs once per count, named NAME.N.
# Sources of kernels (.cu) keep the build's options.
function(minillm_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT" "SOURCES;LINK;RANKS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  add_executable(${name} ${ARG_SOURCES})
  list(TRANSFORM ARG_LINK PREPEND minillm_)
  target_link_libraries(${name} PRIVATE ${ARG_LINK} GTest::gtest)
  set(test_sources ${ARG_SOURCES})
  list(FILTER test_sources INCLUDE REGEX "\\.cpp$")
  set_property(SOURCE ${test_sources} APPEND PROPERTY COMPILE_OPTIONS ${MINILLM_TEST_OPTIONS})
  if(ARG_RANKS)
    foreach(ranks ${ARG_RANKS})
      minillm_launcher(launcher ${ranks})
      add_test(NAME ${name}.${ranks} COMMAND ${launcher} $<TARGET_FILE:${name}>)
      set_tests_properties(${name}.${ranks} PROPERTIES
        TIMEOUT ${ARG_TIMEOUT} PROCESSORS ${ranks} ENVIRONMENT "${MINILLM_TEST_ENVIRONMENT}")
    endforeach()
  else()
    target_link_libraries(${name} PRIVATE GTest::gtest_main)
    gtest_discover_tests(${name} DISCOVERY_MODE PRE_TEST
      PROPERTIES TIMEOUT ${ARG_TIMEOUT} ENVIRONMENT "${MINILLM_TEST_ENVIRONMENT}")
  endif()
endfunction()
