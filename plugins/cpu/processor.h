// Instructions that the processor has and the system allows.
#pragma once

namespace specbuild {

bool has_avx2();  // and FMA and F16C
bool has_avx512_vnni();

}  // namespace specbuild
