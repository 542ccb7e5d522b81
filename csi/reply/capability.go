package reply

import (
	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"penstock.io/penstock/csi/policy"
)

// FileSystem is the only type of file system accepted in a claim.
const FileSystem = "penstock"

// modes lists the access modes that the driver supports.
var modes = map[csi.VolumeCapability_AccessMode_Mode]bool{ // true: read-only
	csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER:        false,
	csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY:   true,
	csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER: false,
	csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER:  false,
	csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY:    true,
	csi.VolumeCapability_AccessMode_MULTI_NODE_SINGLE_WRITER:  false,
	csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER:   false,
}

// Capability checks a volume's capability. Errors: a status of InvalidArgument.
func Capability(c *csi.VolumeCapability) error {
	if c == nil {
		return status.Error(codes.InvalidArgument, "no volume capability")
	}
	if c.GetMount() == nil {
		return status.Error(codes.InvalidArgument, "a volume is a file system: block devices are not served")
	}
	if fs := c.GetMount().GetFsType(); fs != "" && fs != FileSystem {
		return status.Errorf(codes.InvalidArgument, "the file system is %s: leave fsType out", FileSystem)
	}
	if _, known := modes[c.GetAccessMode().GetMode()]; !known {
		return status.Errorf(codes.InvalidArgument, "access mode %v is not known", c.GetAccessMode().GetMode())
	}
	if _, err := policy.MountOptions(c.GetMount().GetMountFlags(), false); err != nil {
		return Error(err)
	}
	return nil
}

// Capabilities checks each capability, and returns the first error.
func Capabilities(all []*csi.VolumeCapability) error {
	for _, c := range all {
		if err := Capability(c); err != nil {
			return err
		}
	}
	return nil
}

// OneNode reports whether the access mode allows one node at a time.
func OneNode(c *csi.VolumeCapability) bool {
	switch c.GetAccessMode().GetMode() {
	case csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER, csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY,
		csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER, csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER:
		return true
	}
	return false
}

// ReadOnly reports whether the access mode allows no writer.
func ReadOnly(c *csi.VolumeCapability) bool { return modes[c.GetAccessMode().GetMode()] }
