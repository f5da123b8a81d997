# Included by project() when gpu_check.sh builds (CMAKE_PROJECT_INCLUDE): its programs run on other machines, from the root
# of a checkout that lies at another path.
function(minillm_relocate)
  if(TARGET parity_test)
    set_target_properties(parity_test PROPERTIES COMPILE_DEFINITIONS "MINILLM_GOLDEN_DIR=\"tests/parity/golden\"")
  endif()
endfunction()
cmake_language(DEFER CALL minillm_relocate)
