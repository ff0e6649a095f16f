# How code is compiled once per instruction set; for the servers' kernels and the workers' library.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()

set(isas baseline)
set(flags_avx2 -mavx2)
set(flags_avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64" AND NOT CMAKE_OSX_ARCHITECTURES MATCHES "arm64")
  list(APPEND isas avx2 avx512)
endif()

# Compiles `source` for each set into a table of that name ("kernels_avx2"), and appends the objects to `objects`.
function(add_for_each_isa name source objects)
  foreach(isa IN LISTS isas)
    add_library(${name}_${isa} OBJECT ${source})
    target_compile_definitions(${name}_${isa} PRIVATE PYPS_KERNELS=${name}_${isa} PYPS_ISA_NAME="${isa}")
    # No errno: the square root vectorises. No contraction into fused multiply-add: every instruction set
    # gives the same bits. No trapping: a division whose result is not always wanted may run
    # unconditionally, which changes floating-point status flags but no result.
    target_compile_options(${name}_${isa} PRIVATE -O3 -fno-math-errno -ffp-contract=off
                                                  -fno-trapping-math ${flags_${isa}})
    list(APPEND ${objects} $<TARGET_OBJECTS:${name}_${isa}>)
  endforeach()
  if(avx2 IN_LIST isas)
    add_compile_definitions(PYPS_HAS_AVX)
  endif()
  set(${objects} ${${objects}} PARENT_SCOPE)
endfunction()
