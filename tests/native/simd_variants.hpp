// The sets of instructions that this machine has, for tests that run with each of them.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "check.hpp"
#include "cpu/select.hpp"

inline std::vector<std::string> simd_variants() {
  std::vector<std::string> names;
  for (const char* name : {"portable", "avx2", "avx512", "amx", "neon", "dotprod"}) {
    try {
      pipespec::cpu::set_simd(pipespec::cpu::set_simd(name));
      names.push_back(name);
    } catch (const std::invalid_argument&) {
      // not on this machine
    }
  }
  return names;
}

// Runs `test(name)` with each of them, then restores the instructions in use.
template <class Test>
void with_each_variant(Test test) {
  const std::string before = pipespec::cpu::simd();
  for (const std::string& name : check::kinds(simd_variants())) {
    pipespec::cpu::set_simd(name);
    test(name);
  }
  pipespec::cpu::set_simd(before);
}
