// The ceiling of float32 arithmetic: a product of two matrices, with its tiles in registers.
//
//   C = Aᵀ B     C_ij = Σ_k A_ki B_kj
//
// Both operands stand with k as their first axis, so that every load is a vec4 of neighbours and nothing is transposed.
//
// A workgroup owns BLOCK × BLOCK numbers of C and walks k STEP at a time, through a tile of A and one of B in workgroup
// memory: 2 · STEP · BLOCK · 4 bytes. While it works on one pair of tiles, the next travels into registers.
// An invocation owns 4·VECS rows by 4·VECS columns of it: for each k it reads 2·VECS vec4s for 16·VECS² multiply-adds.
// Its rows and columns stand in VECS groups of four, BLOCK / VECS apart, so that neighbours read neighbouring vec4s.
// Dispatch: x = N / BLOCK, y = N / BLOCK, for N × N matrices with N a multiple of BLOCK and of STEP.
//
// Constants: N, BLOCK, STEP, VECS. Snippets: none.
// Source: the blocked product of Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", 2008.

const SIDE: u32 = BLOCK / (4u * VECS);                // invocations along one side of the tile
const INVOCATIONS: u32 = SIDE * SIDE;
const ROW_VECS: u32 = BLOCK / 4u;                     // vec4s of a row of a tile
const LOADS: u32 = STEP * ROW_VECS / INVOCATIONS;     // vec4s of a tile that one invocation brings

const_assert SIDE * 4u * VECS == BLOCK && LOADS * INVOCATIONS == STEP * ROW_VECS;
const_assert N % BLOCK == 0u && N % STEP == 0u;

@group(0) @binding(0) var<storage, read> a: array<vec4<f32>>;       // [K, N]
@group(0) @binding(1) var<storage, read> b: array<vec4<f32>>;       // [K, N]
@group(0) @binding(2) var<storage, read_write> c: array<vec4<f32>>; // [N, N]

var<workgroup> a_tile: array<vec4<f32>, STEP * ROW_VECS>;
var<workgroup> b_tile: array<vec4<f32>, STEP * ROW_VECS>;

var<private> a_carried: array<vec4<f32>, LOADS>;
var<private> b_carried: array<vec4<f32>, LOADS>;

fn fetch(k0: u32, tile: vec2<u32>, lane: u32) {
  for (var n = 0u; n < LOADS; n++) { // unroll
    let t = n * INVOCATIONS + lane;
    let row = (k0 + t / ROW_VECS) * (N / 4u) + t % ROW_VECS;
    a_carried[n] = a[row + tile.y * ROW_VECS];
    b_carried[n] = b[row + tile.x * ROW_VECS];
  }
}

@compute @workgroup_size(INVOCATIONS)
fn bench_matmul(@builtin(workgroup_id) tile: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let x = lane % SIDE;
  let y = lane / SIDE;
  var sums: array<vec4<f32>, 4u * VECS * VECS>; // [row][vec4 of columns]

  fetch(0u, tile.xy, lane);
  for (var k0 = 0u; k0 < N; k0 += STEP) {
    workgroupBarrier(); // the last products are done with the tiles
    for (var n = 0u; n < LOADS; n++) { // unroll
      a_tile[n * INVOCATIONS + lane] = a_carried[n];
      b_tile[n * INVOCATIONS + lane] = b_carried[n];
    }
    workgroupBarrier(); // publishes both tiles
    if (k0 + STEP < N) {
      fetch(k0 + STEP, tile.xy, lane);
    }
    for (var k = 0u; k < STEP; k++) { // unroll
      var columns: array<vec4<f32>, VECS>;
      for (var h = 0u; h < VECS; h++) { // unroll
        columns[h] = b_tile[k * ROW_VECS + h * SIDE + x];
      }
      for (var g = 0u; g < VECS; g++) { // unroll
        let rows = a_tile[k * ROW_VECS + g * SIDE + y];
        for (var r = 0u; r < 4u; r++) { // unroll
          for (var h = 0u; h < VECS; h++) { // unroll
            sums[(g * 4u + r) * VECS + h] = fma(vec4<f32>(rows[r]), columns[h], sums[(g * 4u + r) * VECS + h]);
          }
        }
      }
    }
  }

  for (var g = 0u; g < VECS; g++) { // unroll
    for (var r = 0u; r < 4u; r++) { // unroll
      let row = tile.y * BLOCK + (g * SIDE + y) * 4u + r;
      for (var h = 0u; h < VECS; h++) { // unroll
        c[row * (N / 4u) + tile.x * ROW_VECS + h * SIDE + x] = sums[(g * 4u + r) * VECS + h];
      }
    }
  }
}
