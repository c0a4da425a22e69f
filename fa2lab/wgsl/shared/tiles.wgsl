// What a tile of queries and a tile of keys are to each other, as numbers for the trace.
// Expects: problem.wgsl. Constants: BLOCK_K.

const TILE_SKIPPED: f32 = 0.0; // every key is masked for every row: the walk stops before it
const TILE_PARTIAL: f32 = 1.0; // the mask's edge runs through it
const TILE_FULL: f32 = 2.0;    // every key is visible to every row

// Of a tile that the walk does enter. Its first row sees the least.
fn tile_state(row0: u32, key0: u32) -> f32 {
  return select(TILE_PARTIAL, TILE_FULL, keys_seen(row0) >= min(key0 + BLOCK_K, params.n_k));
}
