"""Keys of one request: sealed to a node, bound to a jobhelper, derived."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tie.envelope.errors import EnvelopeError
from tie.envelope.framing import join
from tie.envelope.sealing import (
    DEK_BYTES,
    PRIVATE_KEY_BYTES,
    PUBLIC_KEY_BYTES,
    SEALED_DEK_BYTES,
    Header,
    PrivateKey,
    PublicKey,
    bind_dek,
    open_dek,
    request_key,
    response_key,
    seal_dek,
    unbind_dek,
)
from tie.envelope.secret import Secret

KEY = PrivateKey.from_raw(bytes(range(PRIVATE_KEY_BYTES)))
OTHER = PrivateKey.from_raw(bytes(reversed(range(PRIVATE_KEY_BYTES))))
DEK = bytes(range(100, 100 + DEK_BYTES))


def test_golden_key_id_and_framing() -> None:
    # A change here is a change of the protocol: other clients break.
    assert KEY.public.key_id.hex() == "d99e4496af749b54ee4a2d270c805745"
    assert join(b"ab", b"", b"c").hex() == "00000002616200000000" + "0000000163"


def test_golden_derived_keys() -> None:
    header = Header(node_id="node-0", key_id=bytes(range(16)), sealed_dek=bytes(SEALED_DEK_BYTES), model="m")
    assert header.digest().hex() == "f6c32934f83346886eb5cdd1c75a1d74f0086ee78d424ed77c5281b33398891d"
    assert (
        request_key(Secret(DEK), header).reveal().hex()
        == "9032c0e3aaf90bbef96c6d18463cf66e4063531582392ef63ef26e204ba9f787"
    )
    assert (
        response_key(Secret(DEK), header, bytes(range(32))).reveal().hex()
        == "c8677638bd44776b51147c4f80d050103944b46e4052f51e154933986a0cb032"
    )


# Made once with this module; opening it is deterministic.
GOLDEN_SEALED_DEK = bytes.fromhex(
    "3f9435c7a311fa0a5256b534f036f7389e52cf545a120a5e54102232e96b0d8417b7824b24d193c449aabaf9da5e65a2e5d3584e0769f564"
    "6fb2d28b43410df6cc68b5d2f8ac74c9b5853fb881403bd0352b2c0f907a5b7ffa79428db545fe0d28b6f0abb6e71301df8cb5cbe56442ac"
    "f3b2ac84e05b4fc5b9a92ff295a40e359a06c3af147aa353d6112f0513e37688c7d8c25631e4e9052a9573dd3f9330940d1e751c8f01c148"
    "49a18e308de7598f73e05bf499b2c4cd3345eceec6be3addf90600f050ceb2938c8f5c70fb69b89bb4050b1ffae226270d2cdf5967af8b89"
    "01912cb61fd283f7abe35f440d9029cc08a4d8fb128b6447f0aac091a6b8841bfd137d4c06e5a2584868d992c95f700274aab28f8af71b86"
    "6ea08a5e000745822255d3b39725ad780deb22e7d4f5401e46add02a0c8f6476600bff1573e32608741f182152c690b4469202b4502a1977"
    "9f376e49282f1e1e1146024fd466bec68bd78c105e87d15edb7f07da693af01d460585fbf92f8d1eeae84d3280030860be8b0a7eb07b8597"
    "408263e7b3024d6c4ee7692ea98a5240ddd2619e9c622e7d0e5b5a32bf00d066a82d3d74bde5827dc4519a420f2217efd28b91103034004a"
    "5d2daf3e0d61cd55798fa3f03085ccaef66d6e0941c2f474a1ef274abcac2b701b23e3851fd54408234a21fa1fbb858f9e2aad0360beba32"
    "5205cea314fa36d47d7971fd44a1ed905158455a4c3254192e1538c71075f7ee2ad449df08796091f0567765edf9ea609618f1d0fa008386"
    "80248242b2cd4e075a75107957fd81e0688e2284d1611f5685422152c72cd87a98a9ace0a6e07b4cef172c97050865372e7ac4df90ee2afc"
    "be6ad88c05dec660011aa6539102fb6c16101a64757d39dd4596a9f6e54a04c274968ffea67403499d312abdf7942517bddd1d8424342bda"
    "b88f53c2f6485f86e9462be64309942fe9db40b8cc4c6330322a42407b16b504c6d7b6904d6cd40ec2f2b6a63dfa37576d95d0889ef83a76"
    "69de40d2b158ac25cddc85fc5240e9a0327b3e42aabe3ed6a5fb91af7faf6281aa70e3d3b0264f1e38f66375d1b02b71294aa1c5122a8f13"
    "0fe954e65d482ebb451ece187fb605e443c758998cbbbd4bd46b55e732b518e55714ce07f3d0e4bc6ab074ea99775ba1392fed6666fe3a9e"
    "2a70a86d75964f2a5d5b6fef8da138d0da0ce71f9357ccc3f4da5db9b71b8766af1b6717e2bcceacfff942a00886e8f6f133ac522e05970f"
    "6bb8e70ca6949addadd59fc4a552bbfde106eb498c44b1bedb5f203ac7bda058a4a6e07b9a2ad7146196e74d3d04a60a3c4c2bfbac29322e"
    "f8f4e57ff588f86e4e91bd9c33735a5e3739b73c829731fea150225aa2c8bea7175ffbc6584b92dbcafc8faa5201a06924bb10f58e93e4af"
    "32ae994be14d5058026c9671d1ec536b6f9de46aa9a40cea38eee10f8555eb0ac980817bbedd2924dfc992213f30f927d2f24b921894fa59"
    "17d3c9ef24a18d5d6e49c82f5b1941311f4006e3c9c45781cba74774031202b89e62e384dbe55ae39574fb816542994f9d0dd4e0dac40c74"
    "4eba2aaf8c5417e09b384ce0d883b3e6e08154bf42a68fa1b5cab144b39e5d8ea96caf52ece5bd51b0434526b059ff9a"
)


def test_golden_sealed_dek() -> None:
    assert open_dek(GOLDEN_SEALED_DEK, "node-0", KEY).reveal() == DEK


def test_seal_and_open() -> None:
    sealed = seal_dek(Secret(DEK), "node-0", KEY.public)
    assert len(sealed) == SEALED_DEK_BYTES
    assert open_dek(sealed, "node-0", KEY).reveal() == DEK
    assert sealed != seal_dek(Secret(DEK), "node-0", KEY.public)


def test_sealed_for_another_node_or_key_does_not_open() -> None:
    sealed = seal_dek(Secret(DEK), "node-0", KEY.public)
    for node_id, key in (("node-1", KEY), ("node-0", OTHER)):
        with pytest.raises(EnvelopeError):
            open_dek(sealed, node_id, key)


@given(st.integers(0, SEALED_DEK_BYTES * 8 - 1))
def test_a_flipped_bit_does_not_open(bit: int) -> None:
    sealed = bytearray(GOLDEN_SEALED_DEK)
    sealed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(EnvelopeError):
        open_dek(bytes(sealed), "node-0", KEY)


@given(st.binary(max_size=SEALED_DEK_BYTES + 10))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(EnvelopeError):
        open_dek(data, "node-0", KEY)


def test_a_key_of_another_length_is_not_a_dek() -> None:
    sealed = seal_dek(Secret(b"short"), "node-0", KEY.public)
    with pytest.raises(EnvelopeError):
        open_dek(sealed, "node-0", KEY)


def test_binding_answers_one_envelope_only() -> None:
    first, second = (seal_dek(Secret(DEK), "node-0", KEY.public) for _ in range(2))
    bound = bind_dek(Secret(DEK), first, "node-0", OTHER.public)
    assert unbind_dek(bound, first, "node-0", OTHER).reveal() == DEK
    for sealed, node_id, key in ((second, "node-0", OTHER), (first, "node-1", OTHER), (first, "node-0", KEY)):
        with pytest.raises(EnvelopeError):
            unbind_dek(bound, sealed, node_id, key)
    with pytest.raises(EnvelopeError):
        open_dek(bound, "node-0", OTHER)  # one use of HPKE is not another


@given(st.binary(max_size=PUBLIC_KEY_BYTES + 8))
def test_bytes_that_are_no_public_key(raw: bytes) -> None:
    if len(raw) != PUBLIC_KEY_BYTES:
        with pytest.raises(EnvelopeError):
            PublicKey(raw)


def test_public_key_with_values_over_the_modulus_is_refused() -> None:
    with pytest.raises(EnvelopeError):
        PublicKey(b"\xff" * PUBLIC_KEY_BYTES)


def test_low_order_point_is_refused() -> None:
    raw = KEY.public.raw[:-32] + bytes(32)
    with pytest.raises(EnvelopeError):
        seal_dek(Secret(DEK), "node-0", PublicKey(raw))


def test_raw_private_key_round_trip() -> None:
    assert PrivateKey.from_raw(KEY.raw().reveal()).public.raw == KEY.public.raw
    with pytest.raises(EnvelopeError):
        PrivateKey.from_raw(bytes(PRIVATE_KEY_BYTES - 1))


@pytest.mark.parametrize("field", ["node_id", "key_id", "sealed_dek", "model"])
def test_every_header_field_is_bound_into_the_keys(field: str) -> None:
    values = {"node_id": "n", "key_id": b"k" * 16, "sealed_dek": b"s", "model": "m"}
    one = Header(**values)  # type: ignore[arg-type]
    other = Header(**(values | {field: values[field] * 2}))  # type: ignore[arg-type,operator]
    assert request_key(Secret(DEK), one).reveal() != request_key(Secret(DEK), other).reveal()
    salt = bytes(32)
    assert response_key(Secret(DEK), one, salt).reveal() != response_key(Secret(DEK), other, salt).reveal()


def test_salt_and_direction_separate_keys() -> None:
    header = Header(node_id="n", key_id=b"k", sealed_dek=b"s", model="m")
    keys = [
        bytes(request_key(Secret(DEK), header).reveal()),
        bytes(response_key(Secret(DEK), header, b"a" * 32).reveal()),
        bytes(response_key(Secret(DEK), header, b"b" * 32).reveal()),
    ]
    assert len(set(keys)) == 3


def test_secrets_neither_show_nor_travel_and_are_wiped() -> None:
    secret = Secret(DEK)
    buffer = secret.reveal()
    assert DEK.hex() not in repr(secret)
    assert str(bytes(DEK)) not in repr([secret])
    with pytest.raises(TypeError):
        pickle.dumps(secret)
    with secret:
        pass
    assert buffer == bytes(DEK_BYTES)
    with pytest.raises(ValueError, match="wiped"):
        secret.reveal()
    assert repr(KEY) == "<PrivateKey>"


@given(st.lists(st.binary(max_size=6), max_size=4), st.lists(st.binary(max_size=6), max_size=4))
def test_framing_is_unambiguous(one: list[bytes], other: list[bytes]) -> None:
    assert (join(*one) == join(*other)) == (one == other)
