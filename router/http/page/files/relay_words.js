// What the view of the relay calls things.

export const LEGS = ["queued", "prefill", "transfer", "decode"];

/** What is in a node's pool, by kind: of requests alone, held for handoffs by a lease, and found by its hash. */
export const poolOf = (node) => [
  ["held", node.num_held_blocks - node.num_leased_blocks], ["leased", node.num_leased_blocks], ["cached", node.num_cached_blocks],
];
