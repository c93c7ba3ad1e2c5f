"""Models of images and text together."""

from __future__ import annotations

from typing import Any

import torch

from .decoders import GPT2, GROUPED, SIZES, WIDE
from .row import Inputs, Row, configuration, images, noise, padded, tokens
from .vision import VIT

TEXT: dict[str, Any] = {**SIZES, "max_position_embeddings": 16}
IMAGE = 3  # the token id that stands for a part of an image


def _pair() -> Inputs:
    return {**padded(), **images()}


def _with_image_tokens(count: int) -> Inputs:
    """Return token ids with `count` tokens for an image in each row, between text."""
    ids = tokens(count + 6, seed=4)["input_ids"].clamp(min=8)
    ids[:, 2 : 2 + count] = IMAGE
    return {"input_ids": ids}


def _both(name: str, text: str, vision: str, **more: Any) -> Any:
    return configuration(name, text_config=globals()[text], vision_config=globals()[vision], **more)


CLIP_TEXT = {**TEXT, "projection_dim": 16}
CLIP_VISION = {**VIT, "projection_dim": 16}


def _llava() -> Any:
    return configuration(
        "LlavaConfig",
        vision_config=configuration("CLIPVisionConfig", **VIT),
        text_config=configuration("LlamaConfig", **GROUPED),
        image_token_index=IMAGE,
        vision_feature_layer=-1,
    )


def _paligemma() -> Any:
    return configuration(
        "PaliGemmaConfig",
        vision_config={**VIT, "model_type": "siglip_vision_model", "projection_dim": 32, "vision_use_head": False},
        text_config={**WIDE, "model_type": "gemma"},
        image_token_index=IMAGE,
        projection_dim=32,
        hidden_size=32,
    )


def _gemma3() -> Any:
    return configuration(
        "Gemma3Config",
        vision_config={**VIT, "model_type": "siglip_vision_model", "vision_use_head": False},
        text_config={**WIDE, "sliding_window": 4, "model_type": "gemma3_text"},
        mm_tokens_per_image=4,
        image_token_id=IMAGE,
        boi_token_id=4,
        eoi_token_id=5,
    )


def _smolvlm() -> Any:
    return configuration(
        "SmolVLMConfig",
        vision_config={**VIT},
        text_config={**GROUPED, "model_type": "llama"},
        image_token_id=IMAGE,
        scale_factor=2,
    )


def _internvl() -> Any:
    return configuration(
        "InternVLConfig",
        vision_config={**VIT, "image_size": [32, 32], "patch_size": [8, 8], "model_type": "internvl_vision"},
        text_config={**GROUPED, "model_type": "qwen2"},
        image_token_id=IMAGE,
        downsample_ratio=0.5,
        vision_feature_layer=-1,
    )


QWEN_VISION: dict[str, Any] = {"depth": 2, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2}


def _qwen2_vl() -> Any:
    return configuration(
        "Qwen2VLConfig",
        text_config={
            **GROUPED,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        },
        vision_config={**QWEN_VISION, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2},
        image_token_id=IMAGE,
        video_token_id=4,
        vision_start_token_id=5,
        vision_end_token_id=6,
    )


def _qwen2_5_vl() -> Any:
    return configuration(
        "Qwen2_5_VLConfig",
        text_config={
            **GROUPED,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        },
        vision_config={
            **QWEN_VISION,
            "hidden_size": 32,
            "out_hidden_size": 32,
            "intermediate_size": 64,
            "window_size": 8,
            "fullatt_block_indexes": [1],
        },
        image_token_id=IMAGE,
        video_token_id=4,
        vision_start_token_id=5,
        vision_end_token_id=6,
    )


def _patches() -> Inputs:
    """Return two images of 4 x 4 patches as rows, and token ids with 4 tokens for each."""
    ids = tokens(10, seed=4)["input_ids"].clamp(min=8)
    ids[:, 2], ids[:, 3:7], ids[:, 7] = 5, IMAGE, 6
    return {"input_ids": ids, **noise("pixel_values", 32, 3 * 2 * 4 * 4)}


def _grid() -> Inputs:
    """Return the sizes of the images of `_patches`, and which tokens stand for images."""
    return {
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
        "mm_token_type_ids": (_patches()["input_ids"] == IMAGE).long(),
    }


def _blip2() -> Any:
    return configuration(
        "Blip2Config",
        vision_config=VIT,
        qformer_config={**TEXT, "encoder_hidden_size": 32, "cross_attention_frequency": 1},
        text_config={**SIZES, "model_type": "opt", "ffn_dim": 64, "word_embed_proj_dim": 32},
        num_query_tokens=4,
        image_token_index=IMAGE,
    )


def _vision_encoder_decoder() -> Any:
    return configuration(
        "VisionEncoderDecoderConfig",
        encoder={**VIT, "model_type": "vit"},
        decoder={**GPT2, "model_type": "gpt2", "is_decoder": True, "add_cross_attention": True},
    )


def _image_mask(inputs: Inputs) -> Inputs:
    return {**inputs, "token_type_ids": (inputs["input_ids"] == IMAGE).long()}


LAYOUT: dict[str, Any] = {**SIZES, "max_2d_position_embeddings": 64}


def _boxes() -> Inputs:
    corners = torch.randint(0, 30, (2, 8, 2), generator=torch.Generator().manual_seed(5))
    return {**padded(), "bbox": torch.cat([corners, corners + 20], -1)}


ROWS = {
    "blip": Row("BlipForImageTextRetrieval", lambda: _both("BlipConfig", "BLIP_TEXT", "VIT"), _pair),
    "blip2": Row("Blip2ForConditionalGeneration", _blip2, lambda: {**_with_image_tokens(4), **images()}),
    "clip": Row("CLIPModel", lambda: _both("CLIPConfig", "CLIP_TEXT", "CLIP_VISION", projection_dim=16), _pair),
    "clipseg": Row(
        "CLIPSegForImageSegmentation",
        lambda: _both(
            "CLIPSegConfig",
            "CLIP_TEXT",
            "CLIP_VISION",
            projection_dim=16,
            extract_layers=[0, 1],
            reduce_dim=16,
            decoder_num_attention_heads=4,
            decoder_intermediate_size=32,
        ),
        _pair,
    ),
    "gemma3_vision": Row(
        "Gemma3ForConditionalGeneration", _gemma3, lambda: _image_mask({**_with_image_tokens(4), **images()})
    ),
    "git": Row("GitForCausalLM", {**SIZES, "vision_config": VIT}, _pair),
    "internvl": Row("InternVLForConditionalGeneration", _internvl, lambda: {**_with_image_tokens(4), **images()}),
    "layoutlm": Row("LayoutLMForMaskedLM", LAYOUT, _boxes),
    "layoutlmv3": Row(
        "LayoutLMv3Model",
        {
            **LAYOUT,
            "input_size": 32,
            "patch_size": 8,
            "coordinate_size": 4,
            "shape_size": 8,
            "rel_pos_bins": 8,
            "rel_2d_pos_bins": 8,
        },
        lambda: {**_boxes(), **images()},
    ),
    "llava": Row("LlavaForConditionalGeneration", _llava, lambda: {**_with_image_tokens(16), **images()}),
    "lxmert": Row(
        "LxmertModel",
        {**SIZES, "l_layers": 1, "x_layers": 1, "r_layers": 1, "visual_feat_dim": 16, "visual_pos_dim": 4},
        lambda: {**tokens(), **noise("visual_feats", 2, 5, 16), **noise("visual_pos", 2, 5, 4)},
    ),
    "owlvit": Row("OwlViTModel", lambda: _both("OwlViTConfig", "CLIP_TEXT", "CLIP_VISION", projection_dim=16), _pair),
    "paligemma": Row(
        "PaliGemmaForConditionalGeneration",
        _paligemma,
        lambda: _image_mask({**_with_image_tokens(16), **images()}),
    ),
    "qwen2_5_vl": Row("Qwen2_5_VLForConditionalGeneration", _qwen2_5_vl, _patches, _grid),
    "qwen2_vl": Row("Qwen2VLForConditionalGeneration", _qwen2_vl, _patches, _grid),
    "siglip": Row("SiglipModel", lambda: _both("SiglipConfig", "TEXT", "VIT"), lambda: {**tokens(16), **images()}),
    "smolvlm": Row(
        "SmolVLMForConditionalGeneration",
        _smolvlm,
        lambda: {**_with_image_tokens(4), **noise("pixel_values", 2, 1, 3, 32, 32)},
        fields=("logits",),
    ),
    "vilt": Row("ViltModel", {**SIZES, "image_size": 32, "patch_size": 8, "max_image_length": -1}, _pair),
    "vision_encoder_decoder": Row(
        "VisionEncoderDecoderModel",
        _vision_encoder_decoder,
        lambda: {**images(), **tokens(6, name="decoder_input_ids")},
    ),
    "visual_bert": Row(
        "VisualBertModel",
        {**SIZES, "visual_embedding_dim": 16},
        lambda: {**padded(), **noise("visual_embeds", 2, 5, 16)},
    ),
}
BLIP_TEXT: dict[str, Any] = {**TEXT, "encoder_hidden_size": 32, "projection_dim": 16}
