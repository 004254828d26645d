// build_info(): how this module was built, for `pipespec doctor` and bug reports.
#include <sstream>
#include <string>

#include "bindings/bindings.hpp"

namespace py = pybind11;

namespace pipespec {
namespace {

// The PIPESPEC_* macros come from CMakeLists.txt; lists are joined with commas.
py::list split(const std::string& joined) {
  py::list parts;
  std::istringstream stream(joined);
  for (std::string part; std::getline(stream, part, ',');) parts.append(part);
  return parts;
}

std::string compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#elif defined(__GNUC__)
  return "gcc " __VERSION__;
#else
  return "unknown";
#endif
}

py::dict build_info() {
  py::dict info;
  info["version"] = PIPESPEC_VERSION;
  info["compiler"] = compiler();
  info["cxx_standard"] = static_cast<long>(__cplusplus);
  info["build_type"] = PIPESPEC_BUILD_TYPE;
  info["python"] = PY_VERSION;
  info["pybind11"] = PYBIND11_TOSTRING(PYBIND11_VERSION_MAJOR) "." PYBIND11_TOSTRING(
      PYBIND11_VERSION_MINOR) "." PYBIND11_TOSTRING(PYBIND11_VERSION_PATCH);
  info["simd"] = split(PIPESPEC_SIMD_VARIANTS);
  info["cuda"] = !std::string(PIPESPEC_CUDA_ARCHS).empty();
  info["cuda_archs"] = split(PIPESPEC_CUDA_ARCHS);
  return info;
}

}  // namespace

void bind_build_info(py::module_& m) {
  m.def("build_info", &build_info,
        "How this module was built: versions, compiler, SIMD variants, CUDA architectures.");
}

}  // namespace pipespec
