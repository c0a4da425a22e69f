// What every attention kernel is told about its problem, and what follows from it.
// Expects from the kernel: a uniform `params: Params` at binding 0. Constants: HEAD_DIM.

struct Params {
  n_batch: u32,     // B
  n_heads: u32,     // H, query heads
  n_kv_heads: u32,  // Hkv, divides H
  n_q: u32,         // Tq
  n_k: u32,         // Tk
  causal: u32,      // 0 or 1
  diagonal: i32,    // causal row i sees the keys j <= i + diagonal
  scale: f32,
  neg_inf: f32,     // WGSL has no literal for it
  first_x: u32,     // where this piece of the grid begins, in workgroups
  first_y: u32,
  first_z: u32,
}

// The workgroup's place in the whole grid, of which a dispatch may be one piece.
fn offset_id(workgroup: vec3<u32>) -> vec3<u32> {
  return workgroup + vec3<u32>(params.first_x, params.first_y, params.first_z);
}

// The same for an invocation's place in the grid, where each workgroup is a row of `lanes` invocations.
fn offset_invocation(global: vec3<u32>, lanes: u32) -> vec3<u32> {
  return global + vec3<u32>(params.first_x * lanes, params.first_y, params.first_z);
}

// Lower than or equal to every finite score, so no score can pass below it, and exp(M_NONE - m) never is NaN as
// exp(-inf - -inf) would be. Whether a row has seen a key is asked of its position, never of this number.
const M_NONE: f32 = -0x1.fffffep+127f;

// Every mask leaves a prefix of the keys: row i sees keys 0 .. keys_seen(i)-1. Rows past the end see none.
fn keys_seen(row: u32) -> u32 {
  if (row >= params.n_q) {
    return 0u;
  }
  if (params.causal == 0u) {
    return params.n_k;
  }
  return u32(clamp(i32(row) + params.diagonal + 1, 0, i32(params.n_k)));
}

// Where (batch, row, head) starts in a [B, T, H, D] buffer.
fn q_start(bh: u32, row: u32) -> u32 {
  return (((bh / params.n_heads) * params.n_q + row) * params.n_heads + bh % params.n_heads) * HEAD_DIM;
}

// The same in K or V, for the KV head that query head bh % H reads.
fn kv_start(bh: u32, key: u32) -> u32 {
  let kv_head = (bh % params.n_heads) / (params.n_heads / params.n_kv_heads);
  return (((bh / params.n_heads) * params.n_k + key) * params.n_kv_heads + kv_head) * HEAD_DIM;
}

// exp and log where a NaN stays a NaN and log(0) is -inf. WGSL lets a driver take it that neither NaN nor infinity
// exists, and some make numbers of them. A comparison with NaN is false, whatever a driver takes; l is never negative.
fn exp_shift(x: f32) -> f32 {
  return select(x, exp(x), x < 3.0e38);
}

fn log_sum(l: f32) -> f32 {
  return select(select(l, params.neg_inf, l == 0.0), log(l), l > 0.0);
}

fn ceil_div(a: u32, b: u32) -> u32 {
  return (a + b - 1u) / b;
}
