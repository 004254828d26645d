# The module _cuda: our kernels with the CUDA runtime linked in statically, so that it imports (and says what it misses)
# where there is no GPU and no driver. Sets PIPESPEC_CUDA_FOUND and PIPESPEC_CUDA_ARCHS_BUILT.
set(PIPESPEC_CUDA_FOUND OFF)
set(PIPESPEC_CUDA_ARCHS_BUILT "")
if(NOT PIPESPEC_CUDA MATCHES "^(on|off|auto)$")
  message(FATAL_ERROR "PIPESPEC_CUDA is '${PIPESPEC_CUDA}': use on, off or auto")
endif()
if(PIPESPEC_CUDA STREQUAL "off")
  return()
endif()

include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(PIPESPEC_CUDA STREQUAL "on")
    message(FATAL_ERROR "PIPESPEC_CUDA=on, but no working nvcc was found. Put nvcc on PATH (or set CUDACXX to it), "
                        "or build without the CUDA module: PIPESPEC_CUDA=off.")
  endif()
  message(STATUS "No working nvcc: building without the CUDA module")
  return()
endif()

# Real code for each architecture, PTX for the newest, so that GPUs that come later still run it.
set(archs ${PIPESPEC_CUDA_ARCHS})
if(NOT archs)
  execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --list-gpu-arch OUTPUT_VARIABLE known COMMAND_ERROR_IS_FATAL ANY)
  foreach(arch 80 90 100)
    if(known MATCHES "compute_${arch}\n")  # an older toolkit does not know the newest
      list(APPEND archs ${arch})
    endif()
  endforeach()
endif()
list(POP_BACK archs newest)
list(TRANSFORM archs APPEND "-real")
set(CMAKE_CUDA_ARCHITECTURES ${archs} ${newest})
list(JOIN CMAKE_CUDA_ARCHITECTURES "," PIPESPEC_CUDA_ARCHS_BUILT)

set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
set(PIPESPEC_CUDA_FOUND ON)
message(STATUS "CUDA module: nvcc ${CMAKE_CUDA_COMPILER_VERSION}, architectures ${PIPESPEC_CUDA_ARCHS_BUILT}")

file(GLOB cuda_sources CONFIGURE_DEPENDS csrc/cuda/*.cu csrc/bindings/cuda/*.cpp)
pybind11_add_module(_cuda MODULE NO_EXTRAS ${cuda_sources})
target_link_libraries(_cuda PRIVATE pipespec_flags CUDA::cudart_static)
target_compile_options(_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra>)
if(PIPESPEC_WERROR)
  target_compile_options(_cuda PRIVATE
                         "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-Werror all-warnings -Xcompiler=-Werror>")
  # No kernel of ours spills registers.
  target_compile_options(_cuda PRIVATE
                         "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-Xptxas --warn-on-spills,--warning-as-error>")
endif()
