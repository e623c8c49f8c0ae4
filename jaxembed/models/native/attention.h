// Computes attention within the segments of packed rows.
#pragma once

#include "numbers.h"
#include "product.h"
#include "scratch.h"

typedef struct {
  const bf16 *query, *key, *value;  // start of the first head
  const int32_t* segments;
  bf16* mixed;
  int64_t query_stride, key_stride, value_stride, mixed_stride;  // elements from token to token
  int64_t rows, length, heads, groups, width;  // groups: heads of keys and values
  int64_t heads_per_item;                      // groups that one work item computes
  int causal;
  int64_t reach;  // largest distance that a token sees; the length if there is no limit
  float cap;      // scores become cap * tanh(score / cap); 0: they do not
  const float* bias;        // [heads, distances], what is added to scores; or NULL
  const float *cos, *sin;   // [rows, length, width / 2], by which queries and keys are rotated; or NULL
} Attention;

// The distances from query to key, from 1 - length to length - 1.
static inline int64_t distances(const Attention* t) { return 2 * t->length - 1; }

// Rotate the features k and k + width / 2 of some tokens together. `to` has no other features.
static void rotate(const Attention* t, const bf16* from, int64_t stride, int64_t token,
                   int64_t tokens, bf16* to) {
  const int64_t half = t->width / 2;
  const float *cos = t->cos + token * half, *sin = t->sin + token * half;
  for (int64_t i = 0; i < tokens; i++, from += stride, to += t->width, cos += half, sin += half)
    for (int64_t k = 0; k < half; k += TILE) {
      const __m512 first = load_bf16(from + k), second = load_bf16(from + half + k);
      const __m512 c = _mm512_loadu_ps(cos + k), s = _mm512_loadu_ps(sin + k);
      store_half_bf16(to + k, _mm512_fmsub_ps(first, c, _mm512_mul_ps(second, s)));
      store_half_bf16(to + half + k, _mm512_fmadd_ps(second, c, _mm512_mul_ps(first, s)));
    }
}

// Transpose 16 lines of 16 pairs: line p of `to` gets pair p of each line of `from`.
static inline void turn(const bf16* from, int64_t stride, bf16* to) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(from + i * stride);
  for (int i = 0; i < 8; i++) {
    b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++) {
    a[4 * i] = _mm512_unpacklo_epi64(b[4 * i], b[4 * i + 2]);
    a[4 * i + 1] = _mm512_unpackhi_epi64(b[4 * i], b[4 * i + 2]);
    a[4 * i + 2] = _mm512_unpacklo_epi64(b[4 * i + 1], b[4 * i + 3]);
    a[4 * i + 3] = _mm512_unpackhi_epi64(b[4 * i + 1], b[4 * i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
    b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
    b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
    b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; i++) {
    a[i] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88);
    a[i + 8] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd);
  }
  for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + i * STEP, a[i]);
}

// Lay out the keys as panels, [length / 32][width / 32][2 tiles], that queries are multiplied with.
static void turn_keys(const Attention* t, const bf16* key, int64_t stride, int64_t padded,
                      bf16* panels) {
  for (int64_t first = 0; first < padded; first += TILE)
    for (int64_t step = 0; step < t->width / STEP; step++) {
      bf16* tile = panels + ((first / PANEL) * (t->width / STEP) + step) * 2 * TILE_ELEMENTS +
                   (first / TILE % 2) * TILE_ELEMENTS;
      if (first < t->length) turn(key + first * stride + step * STEP, stride, tile);
      else memset(tile, 0, TILE_ELEMENTS * sizeof(bf16));
    }
}

// Lay out the values as panels, [width / 32][length / 32][2 tiles], that the softmax weights are
// multiplied with. Padding, which may hold NaN, becomes zeros.
static void pair_values(const Attention* t, const bf16* value, const int32_t* segments,
                        int64_t padded, bf16* panels) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
                                       39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int64_t at = 0; at < padded; at += 2)
    for (int64_t column = 0; column < t->width; column += PANEL) {
      __m512i two[2];
      for (int i = 0; i < 2; i++)
        two[i] = at + i < t->length && segments[at + i]
                     ? _mm512_loadu_si512(value + (at + i) * t->value_stride + column)
                     : _mm512_setzero_si512();
      bf16* line = panels + ((column / PANEL) * (padded / STEP) + at / STEP) * 2 * TILE_ELEMENTS +
                   (at % STEP) / 2 * PANEL;
      _mm512_storeu_si512(line, _mm512_permutex2var_epi16(two[0], low, two[1]));
      _mm512_storeu_si512(line + TILE_ELEMENTS, _mm512_permutex2var_epi16(two[0], high, two[1]));
    }
}

// Cap one query's scores of the keys [low, high), and add their bias. `bias` is that of key 0, or
// NULL. Scores are times the square root of a head's width. This is no part of the loop in
// softmax_row, which it would slow down for calls without either.
static __attribute__((noinline)) void change_scores(const Attention* t, int64_t low, int64_t high,
                                                    const float* bias, float* scores) {
  const __m512 root = _mm512_sqrt_ps(_mm512_set1_ps((float)t->width));
  const __m512 cap = _mm512_mul_ps(_mm512_set1_ps(t->cap), root);
  for (int64_t j = low; j < min64(high, t->length); j += TILE) {
    __m512 score = _mm512_loadu_ps(scores + j);
    if (t->cap > 0) score = _mm512_mul_ps(cap, tanh_vector(_mm512_div_ps(score, cap)));
    if (bias) score = _mm512_fmadd_ps(_mm512_loadu_ps(bias + j), root, score);
    _mm512_storeu_ps(scores + j, score);
  }
}

// Write the numerators of one query's softmax over the keys [low, high) to `weights`. `bias` is that
// of key 0, or NULL. Returns the reciprocal of their sum, or 0 for a query of padding.
static inline float softmax_row(const Attention* t, const int32_t* segments, int64_t at, int64_t low,
                                int64_t high, const float* bias, float* scores, bf16* weights) {
  if (!segments[at]) {  // a query of padding, whose scores may all be NaN
    memset(weights + low, 0, (high - low) * sizeof(bf16));
    return 0.0f;
  }
  const __m512 masked = _mm512_set1_ps(-1e30f);
  const __m512i segment = _mm512_set1_epi32(segments[at]);
  const int64_t after = t->causal ? 0 : t->reach;
  const int64_t nearest = max64(at - t->reach, 0), furthest = min64(at + after, t->length - 1);
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const int bounded = t->causal || t->reach < t->length;
  if (bias || t->cap > 0) change_scores(t, low, high, bias, scores);
  __m512 largest = masked;
  for (int64_t j = low; j < high; j += TILE) {
    __mmask16 seen = 0;
    if (j < t->length) {
      seen = _mm512_cmpeq_epi32_mask(_mm512_loadu_si512(segments + j), segment);
      if (bounded) {
        __m512i place = _mm512_add_epi32(lanes, _mm512_set1_epi32((int)j));
        seen &= _mm512_cmpge_epi32_mask(place, _mm512_set1_epi32((int)nearest));
        seen &= _mm512_cmple_epi32_mask(place, _mm512_set1_epi32((int)furthest));
      }
    }
    __m512 score = _mm512_mask_mov_ps(masked, seen, _mm512_loadu_ps(scores + j));
    _mm512_storeu_ps(scores + j, score);
    largest = _mm512_max_ps(largest, score);
  }
  // softmax(s / sqrt(width)), computed with powers of two
  const __m512 factor = _mm512_div_ps(_mm512_set1_ps(1.4426950408889634f),
                                      _mm512_sqrt_ps(_mm512_set1_ps((float)t->width)));
  const __m512 most = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
  __m512 sum = _mm512_setzero_ps();
  for (int64_t j = low; j < high; j += PANEL) {
    __m512 pair[2];
    for (int i = 0; i < 2; i++) {
      __m512 below = _mm512_sub_ps(_mm512_loadu_ps(scores + j + i * TILE), most);
      pair[i] = exp2_vector(_mm512_mul_ps(below, factor));
      sum = _mm512_add_ps(sum, pair[i]);
    }
    store_bf16(weights + j, pair[0], pair[1]);
  }
  return 1.0f / _mm512_reduce_add_ps(sum);
}

// The stride from one query's scores to the next one's. It is not a power of two, or the scores of
// sixteen queries would share a few lines of the first-level cache.
static int64_t stride_of_scores(int64_t padded) { return padded + PANEL; }

// The bytes of scratch memory that `attend` needs.
static size_t attention_memory(const Attention* t) {
  const size_t padded = parts(t->length, STEP) * STEP;
  const size_t rotated = t->cos ? (t->length + PANEL) * t->width * sizeof(bf16) : 0;
  return 2 * padded * t->width * sizeof(bf16) +                               // keys and values
         PANEL * stride_of_scores(padded) * (sizeof(float) + sizeof(bf16)) +  // scores, weights
         PANEL * PANEL * sizeof(float) + rotated;
}

// Compute one row of attention for the groups [first_group, last_group) and the query heads that
// they serve. `memory` has attention_memory bytes.
static void attend(const Attention* t, int64_t row, int64_t first_group, int64_t last_group,
                   char* memory) {
  const int64_t length = t->length, width = t->width, per_group = t->heads / t->groups;
  const int64_t padded = parts(length, STEP) * STEP, stride = stride_of_scores(padded);
  const int32_t* segments = t->segments + row * length;
  float* sums = (float*)memory;
  float* scores = sums + PANEL * PANEL;
  bf16* weights = (bf16*)(scores + PANEL * stride);
  bf16* keys = weights + PANEL * stride;
  bf16* values = keys + padded * width;
  bf16 *rotated_keys = values + padded * width, *rotated_queries = rotated_keys + length * width;

  for (int64_t group = first_group; group < last_group; group++) {
    const bf16* key = t->key + row * length * t->key_stride + group * width;
    if (t->cos) rotate(t, key, t->key_stride, row * length, length, rotated_keys);
    turn_keys(t, t->cos ? rotated_keys : key, t->cos ? width : t->key_stride, padded, keys);
    pair_values(t, t->value + row * length * t->value_stride + group * width, segments, padded,
                values);
    for (int64_t first = 0; first < length; first += PANEL) {
      const int rows = (int)min64(PANEL, length - first);
      // the tokens of a segment are adjacent, so these queries see one contiguous range of keys
      int64_t real = 0, low = length, high = 0;
      for (int64_t at = first; at < first + rows; at++) {
        if (!segments[at]) continue;
        real++;
        if (at < low) low = at;
        high = at + 1;
      }
      if (real) {
        while (low > 0 && segments[low - 1] == segments[low]) low--;
        while (high < length && segments[high] == segments[high - 1]) high++;
        low = max64(low, first - t->reach);
        high = min64(high, first + rows + (t->causal ? 0 : t->reach));
        low = low / PANEL * PANEL, high = parts(high, PANEL) * PANEL;
      }
      for (int64_t head = group * per_group; head < (group + 1) * per_group; head++) {
        bf16* mixed = t->mixed + (row * length + first) * t->mixed_stride + head * width;
        if (!real) {
          for (int i = 0; i < rows; i++)
            memset(mixed + i * t->mixed_stride, 0, width * sizeof(bf16));
          continue;
        }
        const bf16* query = t->query + (row * length + first) * t->query_stride + head * width;
        if (t->cos) rotate(t, query, t->query_stride, row * length + first, rows, rotated_queries);
        if (t->cos) query = rotated_queries;
        const int64_t query_stride = t->cos ? width : t->query_stride;
        for (int64_t j = low; j < high; j += PANEL)
          product(query, query_stride, STEP, TILE * query_stride, rows, keys + j * width,
                  width / STEP, 0, scores + j, stride);
        const float* bias = t->bias ? t->bias + head * distances(t) + length - 1 : NULL;
        float inverse[PANEL];
        for (int i = 0; i < rows; i++)
          inverse[i] = softmax_row(t, segments, first + i, low, high, bias ? bias - first - i : NULL,
                                   scores + i * stride, weights + i * stride);
        for (int64_t column = 0; column < width; column += PANEL) {
          product(weights + low, stride, STEP, TILE * stride, rows,
                  values + column * padded + low * PANEL, (high - low) / STEP, 0, sums, PANEL);
          for (int i = 0; i < rows; i++) {
            const __m512 by = _mm512_set1_ps(inverse[i]);
            store_bf16(mixed + i * t->mixed_stride + column,
                       _mm512_mul_ps(_mm512_load_ps(sums + i * PANEL), by),
                       _mm512_mul_ps(_mm512_load_ps(sums + i * PANEL + TILE), by));
          }
        }
      }
    }
  }
}

// A work item of attention: some groups of one row. Returns 0, or -1 if memory is short.
static int attention_item(const void* arguments, int64_t item) {
  const Attention* t = arguments;
  const int64_t parts_of_row = parts(t->groups, t->heads_per_item);
  const int64_t first = item % parts_of_row * t->heads_per_item;
  char* memory = scratch(attention_memory(t));
  if (!memory) return -1;
  attend(t, item / parts_of_row, first, min64(first + t->heads_per_item, t->groups), memory);
  return 0;
}
