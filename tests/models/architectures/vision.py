"""Models of images and video."""

from __future__ import annotations

from typing import Any

from .row import Inputs, Row, configuration, images, noise

VIT: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SWIN: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": [2, 1],
    "num_heads": [2, 4],
    "window_size": 4,
}
CONVNEXT: dict[str, Any] = {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2}


def _images64() -> Inputs:
    return images(64)


def _video() -> Inputs:
    return noise("pixel_values", 2, 4, 3, 16, 16)


VIDEO: dict[str, Any] = {**VIT, "image_size": 16, "num_frames": 4}

ROWS = {
    "beit": Row("BeitForImageClassification", {**VIT, "use_relative_position_bias": True}, images),
    "bit": Row(
        "BitForImageClassification",
        {"hidden_sizes": [16, 32], "depths": [1, 1], "embedding_size": 16, "num_groups": 4},
        images,
    ),
    "convnext": Row("ConvNextForImageClassification", CONVNEXT, images),
    "convnextv2": Row("ConvNextV2ForImageClassification", CONVNEXT, images),
    "dinov2": Row("Dinov2ForImageClassification", VIT, images),
    "dinov3": Row("DINOv3ViTModel", {**VIT, "num_register_tokens": 2}, images),
    "dpt": Row(
        "DPTForDepthEstimation",
        {
            **VIT,
            "num_hidden_layers": 4,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [8, 8, 16, 16],
            "fusion_hidden_size": 16,
        },
        images,
    ),
    "efficientnet": Row(
        "EfficientNetForImageClassification",
        {
            "image_size": 32,
            "width_coefficient": 0.25,
            "depth_coefficient": 0.25,
            "hidden_dim": 320,
            "kernel_sizes": [3, 3],
            "in_channels": [32, 16],
            "out_channels": [16, 24],
            "strides": [1, 2],
            "num_block_repeats": [1, 1],
            "expand_ratios": [1, 6],
            "depthwise_padding": [],
        },
        images,
    ),
    "focalnet": Row(
        "FocalNetForImageClassification",
        {
            "image_size": 32,
            "embed_dim": 16,
            "depths": [1, 1],
            "hidden_sizes": [16, 32],
            "focal_levels": [2, 2],
            "focal_windows": [3, 3],
        },
        images,
    ),
    "hiera": Row(
        "HieraForImageClassification",
        {
            "image_size": [32, 32],
            "embed_dim": 16,
            "depths": [1, 1],
            "num_heads": [1, 2],
            "query_stride": [2, 2],
            "masked_unit_size": [4, 4],
            "num_query_pool": 1,
            "patch_stride": [4, 4],
        },
        images,
    ),
    "levit": Row(
        "LevitForImageClassification",
        {
            "image_size": 32,
            "hidden_sizes": [16, 24, 32],
            "num_attention_heads": [2, 2, 2],
            "depths": [1, 1, 1],
            "key_dim": [8, 8, 8],
        },
        images,
    ),
    "mobilenet_v2": Row("MobileNetV2ForImageClassification", {"image_size": 32, "depth_multiplier": 0.25}, images),
    "mobilevit": Row(
        "MobileViTForImageClassification",
        {
            "image_size": 64,
            "hidden_sizes": [32, 32, 32],
            "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 32],
            "num_attention_heads": 4,
        },
        _images64,
    ),
    "poolformer": Row(
        "PoolFormerForImageClassification",
        {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]},
        images,
    ),
    "pvt": Row(
        "PvtForImageClassification",
        {
            "image_size": 32,
            "hidden_sizes": [8, 16, 16, 32],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 2, 4],
        },
        images,
    ),
    "resnet": Row(
        "ResNetForImageClassification", {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]}, images
    ),
    "segformer": Row(
        "SegformerForSemanticSegmentation",
        {
            "hidden_sizes": [8, 16, 16, 32],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 2, 4],
            "decoder_hidden_size": 16,
        },
        images,
    ),
    "swin": Row("SwinForImageClassification", SWIN, images),
    "swinv2": Row("Swinv2ForImageClassification", SWIN, images),
    "timesformer": Row("TimesformerForVideoClassification", VIDEO, _video),
    "upernet_convnext": Row(
        "UperNetForSemanticSegmentation",
        lambda: _upernet(),
        images,
    ),
    "videomae": Row("VideoMAEForVideoClassification", VIDEO, _video),
    "vit": Row("ViTForImageClassification", VIT, images),
    "vitdet": Row("VitDetModel", {**VIT, "window_size": 2, "window_block_indices": [0]}, images),
    "yolos": Row("YolosForObjectDetection", {**VIT, "image_size": [32, 32], "num_detection_tokens": 4}, images),
}


def _upernet() -> Any:
    backbone = configuration(
        "ConvNextConfig",
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    return configuration(
        "UperNetConfig",
        backbone_config=backbone,
        hidden_size=16,
        pool_scales=[1],
        auxiliary_in_channels=16,
        auxiliary_channels=8,
    )
