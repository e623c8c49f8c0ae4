// Checks the functions of vectors.h and numbers.h against plain C, one number at a time.
#pragma once

#include <math.h>
#include <stdio.h>

#include "numbers.h"

static int wrong;  // number of errors

static uint32_t bits_of_float(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

// The same bits, or both NaN.
static void expect(const char* what, float got, float wanted) {
  if ((isnan(got) && isnan(wanted)) || bits_of_float(got) == bits_of_float(wanted)) return;
  fprintf(stderr, "%s: %a came, wanted %a\n", what, got, wanted);
  wrong++;
}

static void expect_all(const char* what, vec got, const float* wanted) {
  float numbers[TILE];
  v_store(numbers, got);
  for (int i = 0; i < TILE; i++) expect(what, numbers[i], wanted[i]);
}

enum { ENDS = 19 };
static const float ends[ENDS] = {0.0f,   -0.0f,  1.0f,    -1.0f, 0.5f,     -0.5f, 1.5f,
                                 2.5f,   -2.5f,  7.25f,   -3e7f, 3e7f,     3e38f, -3e38f,
                                 1e-30f, 1e-38f, INFINITY, -INFINITY, NAN};

// Check functions of two vectors for all pairs of ends.
static void check_pairs(void) {
  for (int shift = 0; shift < ENDS; shift++) {
    float x[TILE], y[TILE], wanted[9][TILE];
    for (int first = 0; first < ENDS; first += 3) {
      for (int i = 0; i < TILE; i++) {
        x[i] = ends[(first + i) % ENDS], y[i] = ends[(first + i + shift) % ENDS];
        wanted[0][i] = x[i] + y[i];
        wanted[1][i] = x[i] - y[i];
        wanted[2][i] = x[i] * y[i];
        wanted[3][i] = x[i] / y[i];
        wanted[4][i] = x[i] > y[i] ? x[i] : y[i];
        wanted[5][i] = x[i] < y[i] ? x[i] : y[i];
        wanted[6][i] = fmaf(x[i], y[i], x[i]);
        wanted[7][i] = fmaf(x[i], y[i], -y[i]);
        wanted[8][i] = i % 3 ? x[i] : y[i];
      }
      const vec a = v_load(x), b = v_load(y);
      expect_all("v_add", v_add(a, b), wanted[0]);
      expect_all("v_sub", v_sub(a, b), wanted[1]);
      expect_all("v_mul", v_mul(a, b), wanted[2]);
      expect_all("v_div", v_div(a, b), wanted[3]);
      expect_all("v_max", v_max(a, b), wanted[4]);
      expect_all("v_min", v_min(a, b), wanted[5]);
      expect_all("v_fma", v_fma(a, b, a), wanted[6]);
      expect_all("v_fms", v_fms(a, b, b), wanted[7]);
      int32_t numbers[TILE];
      for (int i = 0; i < TILE; i++) numbers[i] = i % 3 ? -7 : i;
      expect_all("v_choose", v_choose(m_equal(numbers, -7), a, b), wanted[8]);
    }
  }
}

// Check functions of one vector.
static void check_ones(void) {
  float x[TILE], power[TILE], wanted[TILE];
  for (int first = 0; first < ENDS; first++) {
    for (int i = 0; i < TILE; i++) x[i] = ends[(first + i) % ENDS];
    for (int i = 0; i < TILE; i++) wanted[i] = nearbyintf(x[i]);
    expect_all("v_round", v_round(v_load(x)), wanted);
    for (int i = 0; i < TILE; i++) x[i] = fabsf(x[i]), wanted[i] = sqrtf(x[i]);
    expect_all("v_sqrt", v_sqrt(v_load(x)), wanted);
    for (int i = 0; i < TILE; i++) wanted[i] = ends[first];
    expect_all("v_all", v_all(ends[first]), wanted);
  }
  for (int least = -120; least < 150; least += TILE) {
    for (int i = 0; i < TILE; i++) {
      x[i] = 0.75f + (float)i / 32, power[i] = (float)(least + i);
      wanted[i] = ldexpf(x[i], least + i);
    }
    expect_all("v_scale", v_scale(v_load(x), v_load(power)), wanted);
  }
  for (int i = 0; i < TILE; i++) wanted[i] = 0.0f;
  expect_all("v_scale", v_scale(v_all(1.0f), v_all(-1000.0f)), wanted);
  for (int i = 0; i < TILE; i++) wanted[i] = NAN;
  expect_all("v_scale", v_scale(v_all(NAN), v_all(NAN)), wanted);
  for (int place = 0; place < TILE; place++) {
    for (int i = 0; i < TILE; i++) x[i] = i == place ? 99.0f : (float)-i;
    expect("v_sum", v_sum(v_load(x)), (float)(99 - 120 + place));
    expect("v_largest", v_largest(v_load(x)), 99.0f);
  }
}

static unsigned bit_if(int is_set, int i) { return is_set ? 1u << i : 0; }

static void expect_bits(const char* what, mask got, unsigned wanted) {
  if (m_bits(got) == wanted) return;
  fprintf(stderr, "%s: %x came, wanted %x\n", what, m_bits(got), wanted);
  wrong++;
}

static void check_masks(void) {
  int32_t numbers[TILE];
  for (int i = 0; i < TILE; i++) numbers[i] = i * 7 % 5;
  expect_bits("m_none", m_none(), 0);
  for (int low = -3; low < 20; low++) {
    unsigned equal = 0, between = 0;
    for (int i = 0; i < TILE; i++) {
      equal |= bit_if(numbers[i] == low, i);
      between |= bit_if(i + 2 >= low && i + 2 <= low + 5, i);
    }
    expect_bits("m_equal", m_equal(numbers, low), equal);
    expect_bits("m_between", m_between(2, low, low + 5), between);
    expect_bits("m_and", m_and(m_equal(numbers, low), m_between(2, low, low + 5)), equal & between);
  }
}

static void check_transpose(void) {
  enum { STRIDE = TILE + 3 };
  int32_t lines[TILE * STRIDE], turned[TILE * TILE];
  for (int i = 0; i < TILE * STRIDE; i++) lines[i] = i * 0x10001;
  transpose(lines, STRIDE, turned);
  for (int i = 0; i < TILE * TILE; i++)
    wrong += turned[i] != lines[i % TILE * STRIDE + i / TILE];
}

// A float32 as an element and back: to the nearest, ties to even.
static float as_element(float x) {
#ifdef ELEMENTS_ARE_FLOAT32
  return x;
#else
  if (isnan(x)) return x;
  const uint32_t bits = bits_of_float(x);
  const uint32_t nearest = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
  memcpy(&x, &nearest, sizeof x);
  return x;
#endif
}

// Check conversions to elements and back by numbers between elements, and units of two lines.
static void check_elements(void) {
  float x[PANEL];
  element elements[2 * TILE_ELEMENTS], lines[UNIT * PANEL];
  for (uint32_t bits = 0x00800000; bits < 0xff800000 - (1u << 20); bits += (1u << 20) - 0x13) {
    for (uint32_t i = 0; i < PANEL; i++) {
      const uint32_t all = bits + i / 2 * 0x8000 + i % 2;  // ties, and what is above them
      memcpy(&x[i], &all, sizeof all);
      if (isnan(x[i]) || fabsf(x[i]) < 2e-38f) x[i] = (float)i;
    }
    store_elements(elements, v_load(x), v_load(x + TILE));
    for (int half = 0; half < PANEL; half += TILE) {
      float wanted[TILE];
      for (int i = 0; i < TILE; i++) wanted[i] = as_element(x[half + i]);
      expect_all("store_elements", load_elements(elements + half), wanted);
      store_half(elements, v_load(x + half));
      expect_all("store_half", load_elements(elements), wanted);
      store_elements(elements, v_load(x), v_load(x + TILE));
    }
  }
  store_half(elements, v_all(NAN));
  for (int i = 0; i < TILE; i++) x[i] = NAN;
  expect_all("store_half", load_elements(elements), x);
  const element* from[UNIT];
  for (int i = 0; i < UNIT * PANEL; i++) lines[i] = (element)(i + 1);
  for (int left_out = -1; left_out < UNIT; left_out++) {
    for (int i = 0; i < UNIT; i++) from[i] = i == left_out ? NULL : lines + i * PANEL;
    store_units(elements, elements + TILE_ELEMENTS, from);
    for (int column = 0; column < PANEL; column++)
      for (int i = 0; i < UNIT; i++) {
        const int at = column / TILE * TILE_ELEMENTS + column % TILE * UNIT + i;
        wrong += elements[at] != (i == left_out ? 0 : lines[i * PANEL + column]);
      }
  }
}

// Returns 0 if all functions are right.
static int check_vectors(void) {
  check_pairs();
  check_ones();
  check_masks();
  check_transpose();
  check_elements();
  if (wrong) fprintf(stderr, "%d errors\n", wrong);
  return wrong != 0;
}
