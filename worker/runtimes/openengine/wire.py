"""The messages and enumerations of ``openengine.proto``, as classes and constants of this module.

They are made of the descriptors in ``openengine.binpb`` when this is imported, with protobuf's
public interface: code that protoc generates runs with its own version of protobuf alone.
"""

from __future__ import annotations

from importlib.resources import files

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

_FILES = descriptor_pb2.FileDescriptorSet.FromString(files(__package__).joinpath("openengine.binpb").read_bytes())
(_FILE,) = _FILES.file
assert list(_FILE.dependency) == [struct_pb2.DESCRIPTOR.name], "which is in the pool, since it is imported"

DESCRIPTOR = descriptor_pool.Default().AddSerializedFile(_FILE.SerializeToString())
"""Descriptor of the file."""

for _name, _message in DESCRIPTOR.message_types_by_name.items():
    globals()[_name] = message_factory.GetMessageClass(_message)
for _name, _enum in DESCRIPTOR.enum_types_by_name.items():
    globals()[_name] = EnumTypeWrapper(_enum)
    globals().update({_value.name: _value.number for _value in _enum.values})
