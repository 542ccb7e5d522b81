// Package handle owns the handles by which a container orchestrator knows Penstock's volumes
// and snapshots, and the names of volumes and snapshots made by the driver. A handle is opaque
// to the orchestrator and passes through many programs, so the package checks a handle in full
// before use.
//
//	volume      v1-CLUSTER-VOLUME-SUM                 v1-2e7d2c03-00001f-fe6de813
//	snapshot    s1-CLUSTER-VOLUME-GENERATION-SUM      s1-2e7d2c03-00001f-00000003-42311d84
//	group       g1-CLUSTER-ID-NAME-SUM                g1-2e7d2c03-4d65822107fcfd52-csi-nightly-d4547d0d
//	by hand     name=VOLUME[@SNAPSHOT]                name=imagenet@v3
//
// CLUSTER is the beginning of the SHA-256 of the cluster's id. VOLUME and GENERATION are
// numbers that the cluster never reuses. ID is the group's id, drawn by the cluster, and NAME
// is the group's name in Penstock. SUM is the CRC-32C of all text before SUM and its dash.
// Numbers are lower-case hexadecimal. An administrator writes the form by hand to give a
// volume to a claim. The driver mounts a volume with such a handle, but never deletes, expands
// or changes the volume through the handle.
package handle

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"strconv"
	"strings"

	"penstock.io/penstock/meta"
)

// Volume is a volume's handle, decoded: a Cluster and the number Volume, or, by hand, a Name
// and optionally a Snapshot.
type Volume struct {
	Cluster  string // see ClusterOf; "" by hand
	Volume   meta.VolumeID
	Name     string
	Snapshot string
}

// ByHand reports whether an administrator wrote the handle.
func (v Volume) ByHand() bool { return v.Name != "" }

// Snapshot is a snapshot's handle, decoded.
type Snapshot struct {
	Cluster string
	Volume  meta.VolumeID
	At      meta.Generation
}

// Group is the handle of a group of snapshots, decoded.
type Group struct {
	Cluster string
	ID      uint64
	Name    string
}

const (
	volumeVersion   = "v1"
	snapshotVersion = "s1"
	groupVersion    = "g1"
	byHand          = "name="

	clusterDigits    = 8
	volumeDigits     = 6
	generationDigits = 8
	groupDigits      = 16
	sumDigits        = 8
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// ClusterOf returns the CLUSTER part of handles for the cluster with this id.
func ClusterOf(id string) string {
	sum := sha256.Sum256([]byte(id))
	return hex.EncodeToString(sum[:])[:clusterDigits]
}

func sealed(body string) string {
	return fmt.Sprintf("%s-%0*x", body, sumDigits, crc32.Checksum([]byte(body), castagnoli))
}

// String encodes the handle.
func (v Volume) String() string {
	if v.ByHand() {
		if v.Snapshot != "" {
			return byHand + v.Name + "@" + v.Snapshot
		}
		return byHand + v.Name
	}
	return sealed(fmt.Sprintf("%s-%s-%0*x", volumeVersion, v.Cluster, volumeDigits, uint32(v.Volume)))
}

// String encodes the handle.
func (s Snapshot) String() string {
	return sealed(fmt.Sprintf("%s-%s-%0*x-%0*x", snapshotVersion, s.Cluster, volumeDigits, uint32(s.Volume), generationDigits, uint32(s.At)))
}

// String encodes the handle.
func (g Group) String() string {
	return sealed(fmt.Sprintf("%s-%s-%0*x-%s", groupVersion, g.Cluster, groupDigits, g.ID, g.Name))
}

// ParseVolume reads a volume's handle. Errors: Invalid.
func ParseVolume(s string) (Volume, error) {
	if rest, found := strings.CutPrefix(s, byHand); found {
		name, snapshot, at := strings.Cut(rest, "@")
		if checkName(name) != nil || at && checkName(snapshot) != nil {
			return Volume{}, bad(s, "name= is followed by VOLUME or VOLUME@SNAPSHOT")
		}
		return Volume{Name: name, Snapshot: snapshot}, nil
	}
	parts, err := open(s, volumeVersion, volumeDigits)
	if err != nil {
		return Volume{}, err
	}
	v := Volume{Cluster: parts.cluster, Volume: meta.VolumeID(parts.numbers[0])}
	if v.Volume == 0 || v.Volume > meta.MaxVolume {
		return Volume{}, bad(s, "there is no volume of that number")
	}
	return v, nil
}

// ParseSnapshot reads a snapshot's handle. Errors: Invalid.
func ParseSnapshot(s string) (Snapshot, error) {
	parts, err := open(s, snapshotVersion, volumeDigits, generationDigits)
	if err != nil {
		return Snapshot{}, err
	}
	v := Snapshot{Cluster: parts.cluster, Volume: meta.VolumeID(parts.numbers[0]), At: meta.Generation(parts.numbers[1])}
	if v.Volume == 0 || v.Volume > meta.MaxVolume {
		return Snapshot{}, bad(s, "there is no volume of that number")
	}
	return v, nil
}

// ParseGroup reads the handle of a group. Errors: Invalid.
func ParseGroup(s string) (Group, error) {
	body, _, _ := cutLast(s)
	if body == "" || sealed(body) != s {
		return Group{}, bad(s, "it is damaged, or no handle of this driver")
	}
	parts := strings.SplitN(body, "-", 4)
	if len(parts) != 4 || parts[0] != groupVersion {
		return Group{}, bad(s, "it is of a version or kind that this driver doesn't know here")
	}
	if _, err := number(parts[1], clusterDigits); err != nil {
		return Group{}, bad(s, err.Error())
	}
	id, err := number(parts[2], groupDigits)
	if err == nil {
		err = checkName(parts[3])
	}
	if err != nil {
		return Group{}, bad(s, err.Error())
	}
	return Group{Cluster: parts[1], ID: id, Name: parts[3]}, nil
}

type opened struct {
	cluster string
	numbers []uint64
}

// open checks a handle's form and sum, and splits the handle into its parts.
func open(s, version string, digits ...int) (o opened, err error) {
	body, _, _ := cutLast(s)
	if body == "" || sealed(body) != s {
		return o, bad(s, "it is damaged, or no handle of this driver")
	}
	parts := strings.Split(body, "-")
	if len(parts) != 2+len(digits) || parts[0] != version {
		return o, bad(s, "it is of a version or kind that this driver doesn't know here")
	}
	if _, err := number(parts[1], clusterDigits); err != nil {
		return o, bad(s, err.Error())
	}
	o.cluster = parts[1]
	for i, d := range digits {
		n, err := number(parts[2+i], d)
		if err != nil {
			return o, bad(s, err.Error())
		}
		o.numbers = append(o.numbers, n)
	}
	return o, nil
}

func cutLast(s string) (before, after string, found bool) {
	i := strings.LastIndexByte(s, '-')
	if i < 0 {
		return "", s, false
	}
	return s[:i], s[i+1:], true
}

// number parses exactly digits lower-case hexadecimal digits.
func number(s string, digits int) (uint64, error) {
	n, err := strconv.ParseUint(s, 16, 64)
	if err != nil || len(s) != digits || strings.ToLower(s) != s {
		return 0, fmt.Errorf("%q is no number of %d digits", s, digits)
	}
	return n, nil
}

func bad(s, why string) error {
	return meta.E("read handle", meta.Invalid, strconv.Quote(s[:min(len(s), 2*maxPlain)]), errors.New(why))
}

// Beginnings of the names of volumes and snapshots made by the driver. No other name may begin
// so: the driver never takes a volume made by hand for a claim's volume.
const (
	Made   = "csi-"
	Inline = "csi-inline-"
	hashed = "x."
	// draft ends the name of an incomplete volume; no other name ends so.
	draft = "~"
	// maxPlain is the length in bytes of the longest name that NameOf keeps unchanged.
	maxPlain = 63
)

// NameOf returns Penstock's name for a volume or snapshot called name by the orchestrator:
// Made, the class's prefix, and name. NameOf replaces name by its digest if name is longer
// than maxPlain, has characters unsafe in a command line or a path, could be taken for a
// digest, or would make the result an inline volume's name. CheckPrefix must have accepted
// prefix.
func NameOf(prefix, name string) string {
	if len(name) > maxPlain || checkName(name) != nil || strings.HasPrefix(name, hashed) || strings.HasPrefix(Made+prefix+name, Inline) {
		name = hashed + digest(name, 20)
	}
	return Made + prefix + name
}

// DraftOf returns the name of a volume until the volume is complete and gets its final name.
// Until then the orchestrator has no handle of the volume, so the driver may delete the
// volume.
func DraftOf(name string) string { return name + draft }

// IsDraft reports whether DraftOf made the name.
func IsDraft(name string) bool { return strings.HasSuffix(name, draft) }

// InlineName returns the name of a pod's inline volume on a node.
func InlineName(node, volume string) string { return InlinePrefix(node) + digest(volume, 16) }

// InlinePrefix returns the beginning of every name that InlineName returns for a node, and for
// no other node. The node may delete a volume with this prefix if no pod on the node uses the
// volume.
func InlinePrefix(node string) string { return Inline + digest(node, 16) + "-" }

func digest(text string, bytes int) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:bytes])
}

// maxNode bounds the node's name in a holder's name, in bytes.
const maxNode = 128

// Holder returns the name under which a node's mount of a snapshot pins the snapshot: the
// node's name, for people, and a digest of all three arguments, so that each mount has its own
// name.
func Holder(node, volume, staging string) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%q %q %q", node, volume, staging))
	if len(node) > maxNode || checkName(node) != nil {
		node = "node"
	}
	return Made + node + "-" + hex.EncodeToString(sum[:6])
}

// CheckPrefix checks a class's prefix of names: at most 32 letters, digits, dots, dashes and
// underscores, not the beginning of inline volumes' names. "" is valid. The error does not
// contain the prefix. Errors: Invalid.
func CheckPrefix(prefix string) error {
	const op = "check prefix"
	switch {
	case prefix == "":
	case len(prefix) > 32 || checkName(prefix) != nil:
		return meta.E(op, meta.Invalid, "", errors.New("it has at most 32 letters, digits, dots, dashes and underscores"))
	case strings.HasPrefix(Made+prefix, Inline):
		return meta.E(op, meta.Invalid, "", fmt.Errorf("%s begins the names of volumes that pods bring along", strings.TrimPrefix(Inline, Made)))
	}
	return nil
}

func checkName(name string) error {
	if name == "" || name == "." || name == ".." || len(name) > meta.MaxName {
		return errors.New("no name")
	}
	for _, c := range []byte(name) {
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '-', c == '.', c == '_':
		default:
			return fmt.Errorf("%q in a name", c)
		}
	}
	return nil
}
