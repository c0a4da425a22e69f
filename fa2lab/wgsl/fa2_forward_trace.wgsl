// FlashAttention-2 forward with what fa2_forward computes on the way written out: S, and m, l and O after each K tile.
//
//   S = scale · Q Kᵀ
//   m_new = max(m, max s)    alpha = exp(m - m_new)
//   l = alpha · l + Σ exp(s - m_new)    O = alpha · O + Σ exp(s - m_new) · v
//
// O stands as it does in the walk, not yet divided by l: O / l after the last tile is the output.
//
// A workgroup owns BLOCK_Q query rows of one batch and head, an invocation one of them, with its m, l and O in private
// memory, and walks the keys BLOCK_K at a time: the steps of fa2_forward, in its order, with its bits. For looking at,
// not for speed: q, k and v are read where they stand, so there is no workgroup memory and no barrier.
// Scores that are masked, or in tiles that the walk skips, are not written and stay 0.
// Dispatch: x = ceil(Tq / BLOCK_Q), y = B·H.
//
// Constants: BLOCK_Q, BLOCK_K, HEAD_DIM. Snippets: problem.wgsl, tiles.wgsl.
// Source: Dao, "FlashAttention-2", arXiv:2307.08691, section 3.1, algorithm 1.

const_assert BLOCK_Q >= 1u && BLOCK_K >= 1u && HEAD_DIM >= 1u;

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> q: array<f32>;                 // [B, Tq, H, D]
@group(0) @binding(2) var<storage, read> k: array<f32>;                 // [B, Tk, Hkv, D]
@group(0) @binding(3) var<storage, read> v: array<f32>;                 // [B, Tk, Hkv, D]
@group(0) @binding(4) var<storage, read_write> scores: array<f32>;      // [B, H, Tq, Tk]
@group(0) @binding(5) var<storage, read_write> o_steps: array<f32>;     // [B, H, Tq, tiles, D]
@group(0) @binding(6) var<storage, read_write> trace: array<vec4<f32>>; // [B, H, Tq, tiles] of (m, l, alpha, state)

@compute @workgroup_size(BLOCK_Q)
fn fa2_forward_trace(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let workgroup = offset_id(id);
  let bh = workgroup.y;
  let row0 = workgroup.x * BLOCK_Q;
  let row = row0 + lane;
  if (row >= params.n_q) {
    return;
  }
  let seen = keys_seen(row);
  // The tile's last row sees the most; keys from here on are masked for all of its rows.
  let seen_by_tile = keys_seen(min(row0 + BLOCK_Q, params.n_q) - 1u);
  let n_tiles = ceil_div(params.n_k, BLOCK_K);

  var m = M_NONE;
  var l = 0.0;
  var o: array<f32, HEAD_DIM>;
  var s: array<f32, BLOCK_K>;

  for (var j = 0u; j < n_tiles; j++) {
    let key0 = j * BLOCK_K;
    var alpha = 1.0;
    var state = TILE_SKIPPED;
    if (key0 < seen_by_tile) {
      let n = min(max(seen, key0) - key0, BLOCK_K); // how many of the tile's keys this row sees
      var m_new = m;
      for (var c = 0u; c < n; c++) {
        s[c] = score(bh, row, key0 + c);
        scores[(bh * params.n_q + row) * params.n_k + key0 + c] = s[c];
        m_new = max(m_new, s[c]);
      }
      alpha = exp_shift(m - m_new);
      l *= alpha;
      for (var d = 0u; d < HEAD_DIM; d++) {
        o[d] *= alpha;
      }
      for (var c = 0u; c < n; c++) {
        let p = exp_shift(s[c] - m_new);
        let at = kv_start(bh, key0 + c);
        l += p;
        for (var d = 0u; d < HEAD_DIM; d++) {
          o[d] += p * v[at + d];
        }
      }
      m = m_new;
      state = tile_state(row0, key0);
    }
    let step = (bh * params.n_q + row) * n_tiles + j;
    trace[step] = vec4<f32>(m, l, alpha, state);
    for (var d = 0u; d < HEAD_DIM; d++) {
      o_steps[step * HEAD_DIM + d] = o[d];
    }
  }
}

fn score(bh: u32, row: u32, key: u32) -> f32 {
  let q_at = q_start(bh, row);
  let k_at = kv_start(bh, key);
  var s = 0.0;
  for (var d = 0u; d < HEAD_DIM; d++) {
    s += q[q_at + d] * k[k_at + d];
  }
  return s * params.scale;
}
