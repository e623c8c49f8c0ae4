// Means of the rows of a table, as numpy_means in static.py computes them, bit for bit: rows are
// added in order, so that no option may let the compiler reorder sums.

#include <stdint.h>
#include <string.h>

typedef int64_t Size;
enum { COLUMNS = 256 };  // that are added at once: their sums stay in the first-level cache

// The hash of the source and flags of this library, which Python looks for in the file.
const char jaxembed_source[] = JAXEMBED_SOURCE;

// Some rows of a table. Each has `width` floats.
typedef struct {
  const float* table;
  Size rows, width;
} Table;

static Size least(Size a, Size b) { return a < b ? a : b; }

// A row; that nearest to an id which has none.
static const float* row_of(Table of, int32_t id) {
  return of.table + (id < 0 ? 0 : least(id, of.rows - 1)) * of.width;
}

// Not inlined: gcc would add several rows in one loop, and that with one column at a time.
__attribute__((noinline)) static void add_row(const float* row, Size columns, float* restrict sum) {
  for (Size i = 0; i < columns; i++) sum[i] += row[i];
}

// The sum of the first columns of some rows, from zero on: that of negative zeros is positive.
static void add_rows(Table of, const int32_t* ids, Size count, Size columns, float* sum) {
  memset(sum, 0, columns * sizeof *sum);
  for (Size k = 0; k < count; k++) add_row(row_of(of, ids[k]), columns, sum);
}

// The mean of the first columns, COLUMNS at most, of the rows of one id or more. More than `block`
// ids are added in float64 over blocks of so many.
static void mean_of(Table of, const int32_t* ids, Size count, Size block, Size columns,
                    float* restrict mean) {
  float sum[COLUMNS];
  if (count <= block) {
    add_rows(of, ids, count, columns, sum);
  } else {
    double total[COLUMNS] = {0};
    for (Size done = 0; done < count; done += block) {
      add_rows(of, ids + done, least(block, count - done), columns, sum);
      for (Size i = 0; i < columns; i++) total[i] += sum[i];
    }
    for (Size i = 0; i < columns; i++) sum[i] = (float)total[i];
  }
  for (Size i = 0; i < columns; i++) mean[i] = sum[i] / (float)count;
}

// The mean of the rows of each slot, float32 [slots, width]; zeros for an empty slot. A slot is its
// first id and the one after its last, int64 [slots, 2]; the ids are int32.
void jaxembed_means(const float* table, Size rows, Size width, const int32_t* ids,
                    const int64_t* bounds, Size slots, Size block, float* means) {
  for (Size slot = 0; slot < slots; slot++, means += width) {
    const Size start = bounds[2 * slot], count = bounds[2 * slot + 1] - start;
    if (count <= 0) {
      memset(means, 0, width * sizeof *means);
      continue;
    }
    for (Size from = 0; from < width; from += COLUMNS) {
      const Table columns = {table + from, rows, width};
      mean_of(columns, ids + start, count, block, least(COLUMNS, width - from), means + from);
    }
  }
}

// Returns 0 if means of small integers, which are exact, are right on this machine, and 4 if not
// (FAULTS in library.py).
int jaxembed_check(void) {
  enum { ROWS = 5, WIDTH = COLUMNS + 3 };
  static float table[ROWS * WIDTH], means[3 * WIDTH];
  for (int i = 0; i < ROWS * WIDTH; i++) table[i] = (float)(i / WIDTH + i % WIDTH);
  const int32_t ids[] = {1, -7, 2, 9};  // the rows 1, 0, 2 and 4
  const int64_t bounds[] = {0, 4, 2, 2, 3, 4};
  jaxembed_means(table, ROWS, WIDTH, ids, bounds, 3, 3, means);
  for (int i = 0; i < WIDTH; i++)
    if (means[i] != 1.75f + i || means[WIDTH + i] != 0 || means[2 * WIDTH + i] != 4.0f + i) return 4;
  return 0;
}
