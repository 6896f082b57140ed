// Holds every set of instructions that the processor has against plain C++, bit by bit; prints their names.
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "products.h"

using namespace specbuild;

namespace {

std::mt19937 chance(7);

std::vector<float> normal(size_t count) {
  std::normal_distribution<float> draw;
  std::vector<float> numbers(count);
  for (float& number : numbers) number = draw(chance);
  return numbers;
}

std::vector<float> product(const Instructions& set, const Weights& w, const std::vector<float>& x, int64_t rows, Rounding rounding) {
  const int64_t room = rows_of_tiles(set.rows, rows);
  std::vector<float> words(room * w.inner), scales(room * w.blocks()), sums(scales.size()), y(rows * w.columns);
  std::vector<int32_t> offsets(scales.size());
  const Rows rounded{reinterpret_cast<char*>(words.data()), scales.data(), sums.data(), offsets.data()};
  set.round(w, x.data(), rows, rounding, rounded);
  for (int64_t panel = 0; panel < w.panels(); ++panel) set.panel(w, panel, rounded, 0, rows, rounding, y.data());
  return y;
}

std::vector<float> attended(const Instructions& set, int64_t size, float softcap, std::vector<float> keys, std::vector<float> values) {
  const int64_t count = keys.size() / size;
  std::vector<int32_t> rows;
  for (int32_t row = 0; row < count; row += 1 + row % 3) rows.push_back(row);
  std::vector<float> scores(rows.size() + kColumns), y(size), q(keys.begin(), keys.begin() + size);
  const Attention a{1, 1, size, size, count, 0.1f, softcap, keys.data(), values.data(), nullptr};
  const Head head{0, 0, q.data(), rows.data(), static_cast<int64_t>(rows.size()), scores.data(), y.data()};
  set.attend(a, &head, 1);
  return y;
}

// What stands around a product: the norm of some numbers, and SwiGLU of it and of them.
std::vector<float> around(const Instructions& set, const std::vector<float>& x) {
  const int64_t size = x.size();
  std::vector<float> y(2 * size);
  set.rms_norm(x.data(), x.data(), size, 0.1f, y.data());
  set.swiglu(y.data(), x.data(), size, y.data() + size);
  return y;
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Random numbers of so many bits, all of them finite.
void put_factors(std::vector<uint8_t>& factors, size_t count, int bits) {
  const auto floats = normal(count);
  for (const float number : floats) {
    uint8_t bytes[4];
    std::memcpy(bytes, &number, 4);
    if (bits < 32)
      for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(chance());
    if (bits == 16 && (bytes[1] & 0x7c) == 0x7c) bytes[1] ^= 0x40;
    factors.insert(factors.end(), bytes, bytes + bits / 8);
  }
}

bool agrees(const Instructions& set) {
  constexpr int kBits[] = {4, 8, 32, 5, 6}, kFactors[][2] = {{32, 0}, {16, 16}, {8, 8}, {16, 8}, {8, 0}, {32, 32}, {16, 0}};
  for (int draw = 0; draw < 210; ++draw) {
    const int bits = kBits[draw % 5], block = (bits == 5 ? 32 : 16) << draw % 3;
    const auto [scale_bits, minimum_bits] = kFactors[draw % 7];
    const int64_t inner = block * (1 + draw % 11), columns = 1 + draw * 5 % 50, rows = 1 + draw % 13;
    Weights w{nullptr, nullptr, inner, columns, bits, bits == 32 ? static_cast<int>(inner) : block, scale_bits, minimum_bits};
    std::vector<uint8_t> codes(w.panels() * w.panel_bytes()), factors;
    for (uint8_t& code : codes) code = static_cast<uint8_t>(chance());
    for (int64_t panel = 0; bits != 32 && panel < w.panels(); ++panel) {
      for (int64_t step = 0; step < w.steps(); ++step) {
        put_factors(factors, w.blocks_of(step) * kColumns, scale_bits);
        if (minimum_bits) put_factors(factors, w.blocks_of(step) * kColumns, minimum_bits);
        if (scale_bits == 8) put_factors(factors, kColumns * (minimum_bits ? 2 : 1), 32);
      }
    }
    const auto floats = normal(codes.size() / 4);
    w.codes = bits == 32 ? reinterpret_cast<const uint8_t*>(floats.data()) : codes.data();
    w.factors = factors.data();
    if (bits != 32 && static_cast<int64_t>(factors.size()) != w.panels() * w.factor_bytes()) return false;
    const auto x = normal(rows * inner);
    for (Rounding rounding : {Rounding::kBits8, Rounding::kBits16, Rounding::kNone})
      if (!same(product(set, w, x, rows, rounding), product(kPortable, w, x, rows, rounding))) return false;
    if (!same(around(set, x), around(kPortable, x))) return false;
    const int64_t size = 8 * (1 + draw % 17);
    const auto keys = normal(size * (1 + draw)), values = normal(keys.size());
    const float softcap = draw % 2 ? 20.0f : 0.0f;
    if (!same(attended(set, size, softcap, keys, values), attended(kPortable, size, softcap, keys, values))) return false;
  }
  return true;
}

}  // namespace

int main() {
  int count;
  const auto* all = all_instructions(&count);
  for (int index = 0; index < count; ++index) {
    if (!all[index]->usable()) continue;
    if (!agrees(*all[index])) return std::printf("%s differs\n", all[index]->name), 1;
    std::printf("%s\n", all[index]->name);
  }
}
