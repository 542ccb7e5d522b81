// Package handle owns what a container orchestrator knows Penstock's volumes
// and snapshots by, and what they are called here. A handle is opaque to its
// bearer and comes back through many hands, so it is checked in full before
// anything is done with it.
//
//	volume      v1-CLUSTER-VOLUME-SUM                 v1-2e7d2c03-00001f-fe6de813
//	snapshot    s1-CLUSTER-VOLUME-GENERATION-SUM      s1-2e7d2c03-00001f-00000003-42311d84
//	group       g1-CLUSTER-ID-NAME-SUM                g1-2e7d2c03-4d65822107fcfd52-csi-nightly-d4547d0d
//	by hand     name=VOLUME[@SNAPSHOT]                name=imagenet@v3
//
// CLUSTER begins the SHA-256 of the cluster's id, VOLUME
// and GENERATION are numbers that are never used again, SUM is CRC-32C of all
// before it; ID is the group's, drawn by the cluster, and NAME what it is called here;
// digits are lower-case hexadecimal. The form by hand is for volumes
// that an administrator gives to a claim: it can be used, and is never deleted,
// expanded or changed through a handle.
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

// Volume is what a volume's handle says: Volume's number, or by hand a Name and
// perhaps a Snapshot.
type Volume struct {
	Cluster  string // see ClusterOf; "" by hand
	Volume   meta.VolumeID
	Name     string
	Snapshot string
}

// ByHand tells handles that an administrator wrote.
func (v Volume) ByHand() bool { return v.Name != "" }

// Snapshot is what a snapshot's handle says.
type Snapshot struct {
	Cluster string
	Volume  meta.VolumeID
	At      meta.Generation
}

// Group is what the handle of a group of snapshots says.
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

// ClusterOf is how handles name the cluster with this id.
func ClusterOf(id string) string {
	sum := sha256.Sum256([]byte(id))
	return hex.EncodeToString(sum[:])[:clusterDigits]
}

func sealed(body string) string {
	return fmt.Sprintf("%s-%0*x", body, sumDigits, crc32.Checksum([]byte(body), castagnoli))
}

// String is the handle.
func (v Volume) String() string {
	if v.ByHand() {
		if v.Snapshot != "" {
			return byHand + v.Name + "@" + v.Snapshot
		}
		return byHand + v.Name
	}
	return sealed(fmt.Sprintf("%s-%s-%0*x", volumeVersion, v.Cluster, volumeDigits, uint32(v.Volume)))
}

// String is the handle.
func (s Snapshot) String() string {
	return sealed(fmt.Sprintf("%s-%s-%0*x-%0*x", snapshotVersion, s.Cluster, volumeDigits, uint32(s.Volume), generationDigits, uint32(s.At)))
}

// String is the handle.
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

// open checks a handle's form and sum and takes it apart.
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

// number reads exactly so many lower-case hexadecimal digits.
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

// Names of what this driver makes, in the words of Penstock. Everything that it
// made and nothing else begins so: what people made by hand is never taken for
// a claim's.
const (
	Made   = "csi-"
	Inline = "csi-inline-"
	hashed = "x."
	// draft ends the name of a volume that is not whole yet; no other name has it.
	draft = "~"
	// maxPlain is the longest name that is kept as it is.
	maxPlain = 63
)

// NameOf gives the name here of what an orchestrator calls by name: prefix,
// which is the class's, and the name, or its digest where it is long, has
// characters that a command line or a path would trip over, or would make it a
// name of those that pods bring along. prefix is one that CheckPrefix lets pass.
func NameOf(prefix, name string) string {
	if len(name) > maxPlain || checkName(name) != nil || strings.HasPrefix(name, hashed) || strings.HasPrefix(Made+prefix+name, Inline) {
		name = hashed + digest(name, 20)
	}
	return Made + prefix + name
}

// DraftOf names a volume until it is whole and gets its name: nobody was told of
// it by then, so that it may go again.
func DraftOf(name string) string { return name + draft }

// IsDraft tells such names.
func IsDraft(name string) bool { return strings.HasSuffix(name, draft) }

// InlineName gives the name of the volume that a pod on a node brings along.
func InlineName(node, volume string) string { return InlinePrefix(node) + digest(volume, 16) }

// InlinePrefix begins the names of all that InlineName gives for a node, and of no
// other node's: what is under it and used by no pod there may be deleted.
func InlinePrefix(node string) string { return Inline + digest(node, 16) + "-" }

func digest(text string, bytes int) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:bytes])
}

// maxNode is how much of a node's name is told in a holder's.
const maxNode = 128

// Holder gives the name under which a node's mount of a snapshot pins it: for
// people the node, and a digest of all three, so that each mount has its own.
func Holder(node, volume, staging string) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%q %q %q", node, volume, staging))
	if len(node) > maxNode || checkName(node) != nil {
		node = "node"
	}
	return Made + node + "-" + hex.EncodeToString(sum[:6])
}

// CheckPrefix says what is wrong with a class's prefix of names: letters,
// digits, dot, dash and underscore, at most 32; not what begins the names of those
// that pods bring along. The error does not tell the prefix. Errors: Invalid.
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
