// Products of two tiles with the result in registers, as the tiled kernels do all of their arithmetic.
//
// A workgroup owns BLOCK_ROWS rows and meets BLOCK_COLS columns at a time (queries and keys, or keys and queries).
// Its invocations stand in GROUPS groups of ROW_LANES: group g owns the rows r·GROUPS + g, r < ROWS, and its lane x
// COLS columns, four neighbours at a time. So an invocation holds ROWS × COLS scores, and reads ROWS + COLS vec4s from
// workgroup memory for ROWS · COLS · 4 multiply-adds: the reason for owning more than one row.
//
// D is walked in SLICES slices of SLICE vec4s each, so that tiles of any D fit. Where the last slice is shorter, or D
// no multiple of 4, the tiles hold zeros.
//
// Workgroup memory serves eight lanes at once if their vec4s lie in different banks, for which eight vec4s must differ
// in the last three bits of their place. So an index that runs along a tile's first dimension where the tile is filled
// is mixed into its second (`^`): both those who fill and those who read meet eight banks. All the rest of a reader's
// index is constant once loops are unrolled, which leaves no bounds check to pay for.
//
// Expects: const BLOCK_ROWS, BLOCK_COLS; problem.wgsl. Constants: HEAD_DIM, ROWS, ROW_LANES, SLICES.

const GROUPS: u32 = BLOCK_ROWS / ROWS;
const COLS: u32 = BLOCK_COLS / ROW_LANES;
const INVOCATIONS: u32 = GROUPS * ROW_LANES;
const CHUNKS: u32 = (HEAD_DIM + 3u) / 4u;               // vec4s of a row
const SLICE: u32 = (CHUNKS + SLICES - 1u) / SLICES;     // those of a slice
const VECS: u32 = (SLICE + ROW_LANES - 1u) / ROW_LANES; // those of a slice of a result row that one lane holds
const ROW_LOADS: u32 = (BLOCK_ROWS * SLICE + INVOCATIONS - 1u) / INVOCATIONS;
const COL_LOADS: u32 = (BLOCK_COLS * SLICE + INVOCATIONS - 1u) / INVOCATIONS;
const WEIGHT_CHUNKS: u32 = BLOCK_COLS / 4u;
const GROUP_BITS: u32 = min(GROUPS, 8u) - 1u;
const LANE_BITS: u32 = min(ROW_LANES, 8u) - 1u;

const_assert GROUPS * ROWS == BLOCK_ROWS && COLS * ROW_LANES == BLOCK_COLS && COLS % 4u == 0u;
const_assert countOneBits(GROUPS) == 1u && countOneBits(ROW_LANES) == 1u;

alias Scores = array<f32, ROWS * COLS>;
alias RowCounts = array<u32, ROWS>;
alias Part = array<vec4<f32>, ROWS * VECS>;             // [r, vec] of a slice of the results
alias Results = array<vec4<f32>, SLICES * ROWS * VECS>; // [slice, r, vec]

var<workgroup> row_tile: array<array<vec4<f32>, GROUPS>, SLICE * ROWS>;            // [chunk, r][group]
var<workgroup> col_tile: array<array<vec4<f32>, ROW_LANES>, SLICE * COLS>;         // [chunk, c][lane]
var<workgroup> weight_tile: array<array<vec4<f32>, GROUPS>, ROWS * WEIGHT_CHUNKS>; // [r, vec4 of columns][group]

// n, but not to a compiler: software drivers write out every loop whose bound they know, and take seconds for it.
fn rolled(n: u32) -> u32 {
  return min(n, n * params.n_batch);
}

// The column of a tile that is lane x's c-th: four neighbours, then the next four ROW_LANES vec4s on.
fn column_of(c: u32, x: u32) -> u32 {
  return (c / 4u * ROW_LANES + x) * 4u + c % 4u;
}

// Which (row or column, vec4 of the slice) load n of an invocation brings: neighbours bring neighbouring vec4s.
fn load_of(n: u32, lane: u32) -> vec2<u32> {
  if (INVOCATIONS % SLICE == 0u) { // then all but the lane's share is constant
    return vec2<u32>(n * (INVOCATIONS / SLICE) + lane / SLICE, lane % SLICE);
  }
  return vec2<u32>((n * INVOCATIONS + lane) / SLICE, (n * INVOCATIONS + lane) % SLICE);
}

fn store_row(n: u32, lane: u32, value: vec4<f32>) {
  let at = load_of(n, lane);
  if (at.x < BLOCK_ROWS) {
    row_tile[at.y * ROWS + at.x / GROUPS][(at.x % GROUPS) ^ (at.y & GROUP_BITS)] = value;
  }
}

fn store_col(n: u32, lane: u32, value: vec4<f32>) {
  let at = load_of(n, lane);
  if (at.x < BLOCK_COLS) {
    let c = at.x / (4u * ROW_LANES) * 4u + at.x % 4u;
    col_tile[at.y * COLS + c][(at.x / 4u % ROW_LANES) ^ (at.y & LANE_BITS)] = value;
  }
}

// An invocation's scores become the weights with which columns are added up, for all lanes of its rows to read.
fn store_weights(scores: ptr<function, Scores>, group: u32, x: u32) {
  for (var r = 0u; r < rolled(ROWS); r++) { // unroll
    for (var c = 0u; c < rolled(COLS / 4u); c++) { // unroll
      let at = r * COLS + c * 4u;
      let weights = vec4<f32>((*scores)[at], (*scores)[at + 1u], (*scores)[at + 2u], (*scores)[at + 3u]);
      weight_tile[r * WEIGHT_CHUNKS + c * ROW_LANES + x][group ^ ((c * ROW_LANES + x) & GROUP_BITS)] = weights;
    }
  }
}

fn dot_onto(sum: f32, a: vec4<f32>, b: vec4<f32>) -> f32 {
  return fma(a.w, b.w, fma(a.z, b.z, fma(a.y, b.y, fma(a.x, b.x, sum))));
}

// scores += rows · columns over the slice of D that stands in the tiles.
fn multiply_over_d(scores: ptr<function, Scores>, group: u32, x: u32) {
  for (var d = 0u; d < rolled(SLICE); d++) { // unroll
    var rows: array<vec4<f32>, ROWS>;
    for (var r = 0u; r < rolled(ROWS); r++) { // unroll
      rows[r] = row_tile[d * ROWS + r][group ^ (d & GROUP_BITS)];
    }
    for (var c = 0u; c < rolled(COLS); c++) { // unroll
      let column = col_tile[d * COLS + c][x ^ (d & LANE_BITS)];
      for (var r = 0u; r < rolled(ROWS); r++) { // unroll
        (*scores)[r * COLS + c] = dot_onto((*scores)[r * COLS + c], rows[r], column);
      }
    }
  }
}

// The vec4 of a column that is lane x's h-th of the slice. Past the slice's end it is the last one once more, of which
// nobody reads what becomes.
fn column_vec(column: u32, h: u32, x: u32) -> vec4<f32> {
  let c = column / (4u * ROW_LANES) * 4u + column % 4u;
  var chunk = h * ROW_LANES + x;
  if (SLICE % ROW_LANES != 0u) {
    chunk = min(chunk, SLICE - 1u);
  }
  return col_tile[chunk * COLS + c][(column / 4u % ROW_LANES) ^ (chunk & LANE_BITS)];
}

// part += weights · columns, over the tile's columns.
fn multiply_over_columns(part: ptr<function, Part>, group: u32, x: u32) {
  for (var chunk = 0u; chunk < rolled(WEIGHT_CHUNKS); chunk++) { // unroll
    var weights: array<vec4<f32>, ROWS>;
    for (var r = 0u; r < rolled(ROWS); r++) { // unroll
      weights[r] = weight_tile[r * WEIGHT_CHUNKS + chunk][group ^ (chunk & GROUP_BITS)];
    }
    for (var i = 0u; i < rolled(4u); i++) { // unroll
      for (var h = 0u; h < rolled(VECS); h++) { // unroll
        let column = column_vec(chunk * 4u + i, h, x);
        for (var r = 0u; r < rolled(ROWS); r++) { // unroll
          (*part)[r * VECS + h] = fma(vec4<f32>(weights[r][i]), column, (*part)[r * VECS + h]);
        }
      }
    }
  }
}

// Asked of the bits: WGSL lets a driver take it that neither NaN nor infinity exists.
fn is_finite(part: Part) -> bool {
  var exponents = vec4<u32>();
  for (var i = 0u; i < rolled(ROWS * VECS); i++) { // unroll
    exponents = max(exponents, bitcast<vec4<u32>>(part[i]) & vec4<u32>(0x7f800000u));
  }
  return all(exponents != vec4<u32>(0x7f800000u));
}

// multiply_over_columns where a row r takes part in the columns first[r] <= column < last[r] only. Weights of 0 do not
// do: 0 · NaN is NaN.
fn multiply_some_columns(part: ptr<function, Part>, first: RowCounts, last: RowCounts, group: u32, x: u32) {
  for (var chunk = 0u; chunk < WEIGHT_CHUNKS; chunk++) {
    for (var i = 0u; i < rolled(4u); i++) { // unroll
      for (var r = 0u; r < rolled(ROWS); r++) { // unroll
        if (first[r] <= chunk * 4u + i && chunk * 4u + i < last[r]) {
          let weight = weight_tile[r * WEIGHT_CHUNKS + chunk][group ^ (chunk & GROUP_BITS)][i];
          for (var h = 0u; h < rolled(VECS); h++) { // unroll
            let column = column_vec(chunk * 4u + i, h, x);
            (*part)[r * VECS + h] = fma(vec4<f32>(weight), column, (*part)[r * VECS + h]);
          }
        }
      }
    }
  }
}
