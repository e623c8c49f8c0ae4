// Computes attention within the segments of packed rows.
#pragma once

#include "numbers.h"
#include "product.h"
#include "scratch.h"

typedef struct {
  const element *query, *key, *value;  // start of the first head
  const int32_t* segments;
  element* mixed;
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
static void rotate(const Attention* t, const element* from, int64_t stride, int64_t token,
                   int64_t tokens, element* to) {
  const int64_t half = t->width / 2;
  const float *cos = t->cos + token * half, *sin = t->sin + token * half;
  for (int64_t i = 0; i < tokens; i++, from += stride, to += t->width, cos += half, sin += half) {
    int64_t k = 0;
    for (; k + TILE <= half; k += TILE) {
      const vec first = load_elements(from + k), second = load_elements(from + half + k);
      const vec c = v_load(cos + k), s = v_load(sin + k);
      store_half(to + k, v_fms(first, c, v_mul(second, s)));
      store_half(to + half + k, v_fma(second, c, v_mul(first, s)));
    }
#ifdef ELEMENTS_ARE_FLOAT32
    for (; k < half; k++) {  // the last 8 features, if a width is an odd multiple of 16
      to[k] = from[k] * cos[k] - from[half + k] * sin[k];
      to[half + k] = from[half + k] * cos[k] + from[k] * sin[k];
    }
#endif
  }
}

// Lay out the keys as panels, [length / 32][width / STEP][2 tiles], that queries are multiplied with.
static void turn_keys(const Attention* t, const element* key, int64_t stride, int64_t padded,
                      element* panels) {
  for (int64_t first = 0; first < padded; first += TILE)
    for (int64_t step = 0; step < t->width / STEP; step++) {
      element* tile = panels + ((first / PANEL) * (t->width / STEP) + step) * 2 * TILE_ELEMENTS +
                   (first / TILE % 2) * TILE_ELEMENTS;
      if (first < t->length) transpose(key + first * stride + step * STEP, stride / UNIT, tile);
      else memset(tile, 0, TILE_ELEMENTS * sizeof(element));
    }
}

// Where the panels of values, of `padded` tokens, hold a token's column.
static inline element* line_of(element* panels, int64_t padded, int64_t token, int64_t column) {
  return panels + (column / PANEL * (padded / STEP) + token / STEP) * 2 * TILE_ELEMENTS +
         token % STEP * TILE;
}

// Lay out the values as panels, [width / 32][length / STEP][2 tiles], that the softmax weights are
// multiplied with. Padding, which may hold NaN, becomes zeros. If half a panel is left over, its other
// half is not set.
static void pair_values(const Attention* t, const element* value, const int32_t* segments,
                        int64_t padded, element* panels) {
  for (int64_t at = 0; at < padded; at += UNIT)
    for (int64_t column = 0; column < t->width; column += PANEL) {
#ifdef ELEMENTS_ARE_FLOAT32
      if (t->width - column < PANEL) {
        const int is_real = at < t->length && segments[at];
        v_store(line_of(panels, padded, at, column),
                is_real ? v_load(value + at * t->value_stride + column) : v_all(0.0f));
        continue;
      }
#endif
      const element* lines[UNIT];  // NULL: zeros
      for (int i = 0; i < UNIT; i++)
        lines[i] = at + i < t->length && segments[at + i]
                       ? value + (at + i) * t->value_stride + column
                       : NULL;
      element* line = line_of(panels, padded, at, column);
      store_units(line, line + TILE_ELEMENTS, lines);
    }
}

// Cap one query's scores of the keys [low, high), and add their bias. `bias` is that of key 0, or
// NULL. Scores are times the square root of a head's width. This is no part of the loop in
// softmax_row, which it would slow down for calls without either.
static __attribute__((noinline)) void change_scores(const Attention* t, int64_t low, int64_t high,
                                                    const float* bias, float* scores) {
  const vec root = v_sqrt(v_all((float)t->width));
  const vec cap = v_mul(v_all(t->cap), root);
  for (int64_t j = low; j < min64(high, t->length); j += TILE) {
    vec score = v_load(scores + j);
    if (t->cap > 0) score = v_mul(cap, tanh_vector(v_div(score, cap)));
    if (bias) score = v_fma(v_load(bias + j), root, score);
    v_store(scores + j, score);
  }
}

// Write the numerators of one query's softmax over the keys [low, high) to `weights`. `bias` is that
// of key 0, or NULL. Returns the reciprocal of their sum, or 0 for a query of padding.
static inline float softmax_row(const Attention* t, const int32_t* segments, int64_t at, int64_t low,
                                int64_t high, const float* bias, float* scores, element* weights) {
  if (!segments[at]) {  // a query of padding, whose scores may all be NaN
    memset(weights + low, 0, (high - low) * sizeof(element));
    return 0.0f;
  }
  const vec masked = v_all(-1e30f);
  const int64_t after = t->causal ? 0 : t->reach;
  const int64_t nearest = max64(at - t->reach, 0), furthest = min64(at + after, t->length - 1);
  const int bounded = t->causal || t->reach < t->length;
  if (bias || t->cap > 0) change_scores(t, low, high, bias, scores);
  vec largest = masked;
  for (int64_t j = low; j < high; j += TILE) {
    mask seen = m_none();
    if (j < t->length) {
      seen = m_equal(segments + j, segments[at]);
      if (bounded) seen = m_and(seen, m_between((int)j, (int)nearest, (int)furthest));
    }
    vec score = v_choose(seen, v_load(scores + j), masked);
    v_store(scores + j, score);
    largest = v_max(largest, score);
  }
  // softmax(s / sqrt(width)), computed with powers of two
  const vec factor = v_div(v_all(1.4426950408889634f),
                                      v_sqrt(v_all((float)t->width)));
  const vec most = v_all(v_largest(largest));
  vec sum = v_all(0.0f);
  for (int64_t j = low; j < high; j += PANEL) {
    vec pair[2];
    for (int i = 0; i < 2; i++) {
      vec below = v_sub(v_load(scores + j + i * TILE), most);
      pair[i] = exp2_vector(v_mul(below, factor));
      sum = v_add(sum, pair[i]);
    }
    store_elements(weights + j, pair[0], pair[1]);
  }
  return 1.0f / v_sum(sum);
}

// The stride from one query's scores to the next one's. It is not a power of two, or the scores of
// sixteen queries would share a few lines of the first-level cache.
static int64_t stride_of_scores(int64_t padded) { return padded + PANEL; }

// The bytes of scratch memory that `attend` needs.
static size_t attention_memory(const Attention* t) {
  const size_t padded = parts(t->length, PANEL) * PANEL;
  const size_t rotated = t->cos ? (t->length + PANEL) * t->width * sizeof(element) : 0;
  const size_t wide = parts(t->width, PANEL) * PANEL;  // of values
  return padded * (t->width + wide) * sizeof(element) +                          // keys and values
         PANEL * stride_of_scores(padded) * (sizeof(float) + sizeof(element)) +  // scores, weights
         PANEL * PANEL * sizeof(float) + rotated;
}

// Compute one row of attention for the groups [first_group, last_group) and the query heads that
// they serve. `memory` has attention_memory bytes.
static void attend(const Attention* t, int64_t row, int64_t first_group, int64_t last_group,
                   char* memory) {
  const int64_t length = t->length, width = t->width, per_group = t->heads / t->groups;
  const int64_t padded = parts(length, PANEL) * PANEL, stride = stride_of_scores(padded);
  const int32_t* segments = t->segments + row * length;
  float* sums = (float*)memory;
  float* scores = sums + PANEL * PANEL;
  element* weights = (element*)(scores + PANEL * stride);
  element* keys = weights + PANEL * stride;
  element* values = keys + padded * width;
  element* rotated_keys = values + padded * parts(width, PANEL) * PANEL;
  element* rotated_queries = rotated_keys + length * width;

  for (int64_t group = first_group; group < last_group; group++) {
    const element* key = t->key + row * length * t->key_stride + group * width;
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
        element* mixed = t->mixed + (row * length + first) * t->mixed_stride + head * width;
        if (!real) {
          for (int i = 0; i < rows; i++)
            memset(mixed + i * t->mixed_stride, 0, width * sizeof(element));
          continue;
        }
        const element* query = t->query + (row * length + first) * t->query_stride + head * width;
        if (t->cos) rotate(t, query, t->query_stride, row * length + first, rows, rotated_queries);
        if (t->cos) query = rotated_queries;
        const int64_t query_stride = t->cos ? width : t->query_stride;
        for (int64_t j = low; j < high; j += PANEL)
          product(query, query_stride, STEP, TILE * query_stride, rows, keys + j * width,
                  width / STEP, 0, 0, scores + j, stride);
        const float* bias = t->bias ? t->bias + head * distances(t) + length - 1 : NULL;
        float inverse[PANEL];
        for (int i = 0; i < rows; i++)
          inverse[i] = softmax_row(t, segments, first + i, low, high, bias ? bias - first - i : NULL,
                                   scores + i * stride, weights + i * stride);
        for (int64_t column = 0; column < width; column += PANEL) {
#ifdef ELEMENTS_ARE_FLOAT32
          if (width - column < PANEL) {
            half_product(weights + low, stride, STEP, TILE * stride, rows,
                         values + column * padded + low * PANEL, (high - low) / STEP, sums, PANEL);
            for (int i = 0; i < rows; i++)
              v_store(mixed + i * t->mixed_stride + column,
                      v_mul(v_load(sums + i * PANEL), v_all(inverse[i])));
            continue;
          }
#endif
          product(weights + low, stride, STEP, TILE * stride, rows,
                  values + column * padded + low * PANEL, (high - low) / STEP, 0, 0, sums, PANEL);
          for (int i = 0; i < rows; i++) {
            const vec by = v_all(inverse[i]);
            store_elements(mixed + i * t->mixed_stride + column,
                       v_mul(v_load(sums + i * PANEL), by),
                       v_mul(v_load(sums + i * PANEL + TILE), by));
          }
        }
      }
    }
  }
}

// A work item of attention: some groups of one row. Returns 0, or -1 if memory is short.
static int attention_item(const void* arguments, int64_t item, int64_t before) {
  (void)before;
  const Attention* t = arguments;
  const int64_t parts_of_row = parts(t->groups, t->heads_per_item);
  const int64_t first = item % parts_of_row * t->heads_per_item;
  char* memory = scratch(attention_memory(t));
  if (!memory) return -1;
  attend(t, item / parts_of_row, first, min64(first + t->heads_per_item, t->groups), memory);
  return 0;
}
