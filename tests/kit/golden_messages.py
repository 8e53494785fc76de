"""One message of each kind and its bytes, which change only together with PROTOCOL_VERSION."""

from __future__ import annotations

from formkit import CUDA_UUID, piece, tensor

from lmcache_kernels.transfer import messages as m
from lmcache_kernels.transfer.cache_forms import ArraysForm, AxesForm, PagesForm, ShardPart
from lmcache_kernels.transfer.sharing.descriptors import CudaShare

GOLDEN = [
    (m.Hello(protocol=1), "83a26f70a568656c6c6fa870726f746f636f6c01a8736f667477617265a0"),
    (
        m.Welcome(protocol=1, incarnation="i", clock=1.0, chunk_tokens=256),
        "86a26f70a777656c636f6d65a870726f746f636f6c01ab696e6361726e6174696f6ea169a5636c6f"
        "636bcb3ff0000000000000ac6368756e6b5f746f6b656e73cd0100a8736f667477617265a0",
    ),
    (m.Ping(instance=7), "82a26f70a470696e67a8696e7374616e636507"),
    (
        m.Pong(incarnation="i", registered=True),
        "83a26f70a4706f6e67ab696e6361726e6174696f6ea169aa72656769737465726564c3",
    ),
    (
        m.Register(instance=1, shard=b"s", chunk_bytes=2),
        "84a26f70a87265676973746572a8696e7374616e636501a57368617264c40173ab6368756e6b5f62"
        "7974657302",
    ),
    (
        m.Registered(arena_name="a", arena_bytes=3),
        "83a26f70aa72656769737465726564aa6172656e615f6e616d65a161ab6172656e615f627974657303",
    ),
    (m.Unregister(instance=1), "82a26f70aa756e7265676973746572a8696e7374616e636501"),
    (m.Done(), "81a26f70a4646f6e65"),
    (m.EndSession(request="r"), "82a26f70aa656e6473657373696f6ea772657175657374a172"),
    (m.Clear(), "82a26f70a5636c656172a673686172647390"),
    (m.Clear(shards=[b"s"]), "82a26f70a5636c656172a673686172647391c40173"),
    (m.Cleared(chunks=4), "82a26f70a7636c6561726564a66368756e6b7304"),
    (m.Found(chunks=4), "82a26f70a5666f756e64a66368756e6b7304"),
    (
        m.PrepareStore(instance=1, digests=b"d"),
        "83a26f70ac7072657061726573746f7265a8696e7374616e636501a764696765737473c40164",
    ),
    (
        m.CommitStore(instance=1, ticket=2),
        "83a26f70ab636f6d6d697473746f7265a8696e7374616e636501a67469636b657402",
    ),
    (
        m.AbortStore(instance=1, ticket=2),
        "83a26f70aa61626f727473746f7265a8696e7374616e636501a67469636b657402",
    ),
    (
        m.PrepareRetrieve(instance=1, digests=b"d"),
        "83a26f70af707265706172657265747269657665a8696e7374616e636501a764696765737473c40164",
    ),
    (
        m.ErrorReply(code="internal", message="x"),
        "83a26f70aa6572726f727265706c79a4636f6465a8696e7465726e616ca76d657373616765a178",
    ),
    (
        m.Lookup(request="r", shards=[b"s"], digests=b"d"),
        "84a26f70a66c6f6f6b7570a772657175657374a172a673686172647391c40173a764696765737473c40164",
    ),
    (
        m.Lookup(request="r", shards=[b"s"], digests=b"d", windows=[2]),
        "85a26f70a66c6f6f6b7570a772657175657374a172a673686172647391c40173a764696765737473"
        "c40164a777696e646f77739102",
    ),
    (
        m.Pin(pin="p", shards=[b"s"], digests=b"d", seconds=1.5),
        "85a26f70a370696ea370696ea170a673686172647391c40173a764696765737473c40164a7736563"
        "6f6e6473cb3ff8000000000000",
    ),
    (
        m.Unpin(pin="p"),
        "82a26f70a5756e70696ea370696ea170",
    ),
    (
        m.PrepareStore(instance=1, digests=b"d", tenant="t"),
        "84a26f70ac7072657061726573746f7265a8696e7374616e636501a764696765737473c40164a674"
        "656e616e74a174",
    ),
    (
        m.StoreSlots(ticket=1, indices=[0], offsets=[300]),
        "84a26f70aa73746f7265736c6f7473a67469636b657401a7696e64696365739100a76f6666736574"
        "7391cd012c",
    ),
    (
        m.LoadSlots(ticket=1, offsets=[2]),
        "83a26f70a96c6f6164736c6f7473a67469636b657401a76f6666736574739102",
    ),
    (
        m.CommitRetrieve(instance=1, ticket=2, damaged=[3]),
        "85a26f70ae636f6d6d69747265747269657665a8696e7374616e636501a67469636b657402a76461"
        "6d616765649103a66661696c6564c2",
    ),
    (
        m.RegisterCache(
            instance=1,
            shard=b"s",
            part=ShardPart(layers=(("a", "b"),)),
            groups=[
                (
                    piece(AxesForm(axes="block token dim", sizes={"token": 4})),
                    piece(
                        PagesForm(block_tokens=4, format="f"),
                        (
                            tensor(
                                share=CudaShare(
                                    handle=bytes(64), device=CUDA_UUID, nbytes=64, offset=0
                                )
                            ),
                        ),
                    ),
                    piece(ArraysForm(block_tokens=4, widths=(6, 2))),
                )
            ],
        ),
        "86a26f70ad72656769737465726361636865a8696e7374616e636501a57368617264c40173a470617274"
        "85a5696e64657800a5636f756e7401a5737461676500a673746167657301a66c61796572739192a161a1"
        "62a667726f757073919383a774656e736f72739185a776657273696f6e01a5736861726584a26f6ea363"
        "7075a66e6279746573cd0200a66f666673657400a77365676d656e74b16c6d63616368655f6b65726e65"
        "6c735f30a56474797065a575696e7438a5736861706593020408a77374726964657393200801a56c6973"
        "747390a4666f726d84a4666f726da461786573a461786573af626c6f636b20746f6b656e2064696da573"
        "697a657381a5746f6b656e04b0746f6b656e735f7065725f73746174650183a774656e736f72739185a7"
        "76657273696f6e01a5736861726585a26f6ea463756461a66e627974657340a66f666673657400a66861"
        "6e646c65c440000000000000000000000000000000000000000000000000000000000000000000000000"
        "00000000000000000000000000000000000000000000000000000000a6646576696365d9243031323334"
        "3536372d383961622d636465662d303132332d343536373839616263646566a56474797065a575696e74"
        "38a5736861706593020408a77374726964657393200801a56c6973747390a4666f726d83a4666f726da5"
        "7061676573ac626c6f636b5f746f6b656e7304a6666f726d6174a16683a774656e736f72739185a77665"
        "7273696f6e01a5736861726584a26f6ea3637075a66e6279746573cd0200a66f666673657400a7736567"
        "6d656e74b16c6d63616368655f6b65726e656c735f30a56474797065a575696e7438a573686170659302"
        "0408a77374726964657393200801a56c6973747390a4666f726d84a4666f726da6617272617973ac626c"
        "6f636b5f746f6b656e7304a6776964746873920602b0746f6b656e735f7065725f737461746501ac6d61"
        "785f70726f6772616d73c0",
    ),
    (
        m.StoreBlocks(instance=1, transfer=2, digests=b"d", blocks=[b"bbbb"], event=b"e"),
        "86a26f70ab73746f7265626c6f636b73a8696e7374616e636501a87472616e7366657202a76469676573"
        "7473c40164a6626c6f636b7391c40462626262a56576656e74c40165",
    ),
    (m.Copied(ticket=1, chunks=2), "83a26f70a6636f70696564a67469636b657401a66368756e6b7302"),
    (
        m.LoadBlocks(instance=1, transfer=2, digests=b"d", blocks=[b"bbbb"], skip_tokens=3),
        "87a26f70aa6c6f6164626c6f636b73a8696e7374616e636501a87472616e7366657202a7646967657374"
        "73c40164a6626c6f636b7391c40462626262ab736b69705f746f6b656e7303a56576656e74c400",
    ),
    (m.Loaded(chunks=2), "82a26f70a66c6f61646564a66368756e6b7302"),
    (
        m.Settle(instance=1, transfers=[2]),
        "83a26f70a6736574746c65a8696e7374616e636501a97472616e73666572739102",
    ),
    (
        m.PutPart(instance=1, ticket=2, index=3, start=4, data=b"d"),
        "86a26f70a770757470617274a8696e7374616e636501a67469636b657402a5696e64657803a57374"
        "61727404a464617461c40164",
    ),
    (
        m.GetPart(instance=1, ticket=2, index=3, start=4, nbytes=5),
        "86a26f70a767657470617274a8696e7374616e636501a67469636b657402a5696e64657803a57374"
        "61727404a66e627974657305",
    ),
    (
        m.Part(data=b"d"),
        "82a26f70a470617274a464617461c40164",
    ),
]
