"""What wcpipe computes: words, worlds, rollouts, rewards, advantages and updates.

Nothing here parses arguments, opens a console or imports `stages`.

Shape suffixes used in names throughout (after torchtitan and nanochat), outermost axis first:

    P  prompts = groups        B  batch                T  latents (time)       H, W  height, width (pixels or cells)
    G  candidates of a group   N  selected samples     F  frames               L     tokens
    A  actions                 R  rewards              C  latent channels      D     model width

so `latents_BCTHW` is a batch of latent clips, `c2w_T44` one camera-to-world matrix a latent, `advantage_G` one
number a candidate.
"""

__version__ = "0.1.0"
