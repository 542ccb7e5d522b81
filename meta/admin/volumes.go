package admin

import (
	"context"
	"errors"
	"iter"
	"path"
	"slices"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"

	"penstock.io/penstock/meta"
)

// VolumeOf translates a volume from package meta.
func VolumeOf(i meta.VolumeInfo) *Volume {
	x := &Volume{}
	Say(x, i)
	return x
}

// Info translates a volume to package meta.
func (x *Volume) Info() (i meta.VolumeInfo) {
	Hear(&i, x)
	return i
}

// EachVolume lists volumes, page by page; q requests the first page. EachVolume modifies q.
// Errors: as of ListVolumes.
func (c *Client) EachVolume(ctx context.Context, q *ListVolumesRequest) iter.Seq2[meta.VolumeInfo, error] {
	return func(yield func(meta.VolumeInfo, error) bool) {
		for {
			page, err := c.Volumes.ListVolumes(ctx, q)
			if err != nil {
				yield(meta.VolumeInfo{}, err)
				return
			}
			for _, v := range page.Volumes {
				if !yield(v.Info(), nil) {
					return
				}
			}
			if q.PageToken = page.NextPageToken; q.PageToken == "" {
				return
			}
		}
	}
}

// FindVolume finds a volume. Errors: NoSuchVolume.
func (c *Client) FindVolume(ctx context.Context, volume *VolumeRef) (meta.VolumeInfo, error) {
	return volumeInfo(c.Volumes.GetVolume(ctx, &GetVolumeRequest{Volume: volume}))
}

// policyField returns the field of a Policy for a word of a policy (meta.PolicyWords); nil: the
// API knows no such word.
func policyField(word string) protoreflect.FieldDescriptor {
	name := strings.ReplaceAll(word, "-", "_")
	switch word {
	case "quota":
		name = "quota_bytes"
	case "noatime":
		name = "no_atime"
	}
	return (*Policy)(nil).ProtoReflect().Descriptor().Fields().ByName(protoreflect.Name(name))
}

// SettingsOf translates settings: the words of the policy p that w.Only names, or all words if
// w.Only is nil, and the settings that are set in w. Errors: NotSupported (an unknown word).
func SettingsOf(p meta.Policy, w meta.VolumeWords) (*VolumeSettings, error) {
	x := &VolumeSettings{Policy: &Policy{}, TrashSeconds: w.TrashSeconds, Compression: w.Compression,
		AdvisoryBytes: w.AdvisoryBytes, AdvisoryInodes: w.AdvisoryInodes, Labels: map[string]string{}, Force: w.Force}
	words := w.Only
	if words == nil {
		words = meta.PolicyWords()
	}
	all := &Policy{}
	Say(all, p)
	for _, word := range words {
		f := policyField(word)
		if f == nil {
			return nil, meta.E("change policy", meta.NotSupported, word, errors.New("this program knows no such word of a policy"))
		}
		x.Policy.ProtoReflect().Set(f, all.ProtoReflect().Get(f)) // zero values, too
	}
	for key, value := range w.Labels {
		if value == nil {
			x.RemoveLabels = append(x.RemoveLabels, key)
		} else {
			x.Labels[key] = *value
		}
	}
	slices.Sort(x.RemoveLabels)
	return x, nil
}

// Words translates settings to package meta. The words of the policy that count are in Only,
// which is not nil. Errors: NotSupported (a newer program has sent a setting that this one does
// not know), Invalid (a label is both set and removed).
func (x *VolumeSettings) Words() (p meta.Policy, w meta.VolumeWords, err error) {
	const op = "change volume"
	if len(x.ProtoReflect().GetUnknown())+len(x.GetPolicy().ProtoReflect().GetUnknown()) > 0 {
		return p, w, meta.E(op, meta.NotSupported, "", errors.New("this server does not know all of the settings: it is older than the caller"))
	}
	w = meta.VolumeWords{Only: []string{}}
	if x == nil {
		return p, w, nil
	}
	w.TrashSeconds, w.Compression, w.AdvisoryBytes, w.AdvisoryInodes, w.Force = x.TrashSeconds, x.Compression, x.AdvisoryBytes, x.AdvisoryInodes, x.Force
	Hear(&p, x.GetPolicy())
	for _, word := range meta.PolicyWords() {
		if x.GetPolicy().ProtoReflect().Has(policyField(word)) {
			w.Only = append(w.Only, word)
		}
	}
	if len(x.Labels)+len(x.RemoveLabels) > 0 {
		w.Labels = map[string]*string{}
	}
	for key, value := range x.Labels {
		w.Labels[key] = &value
	}
	for _, key := range x.RemoveLabels {
		if w.Labels[key] != nil {
			return p, w, meta.E(op, meta.Invalid, key, errors.New("the label is to be set and to be removed"))
		}
		w.Labels[key] = nil
	}
	return p, w, nil
}

// CreateVolume makes a volume that is not attached. Errors: as of the API's CreateVolume.
func (c *Client) CreateVolume(ctx context.Context, name string, p meta.Policy, words meta.VolumeWords) (meta.VolumeInfo, error) {
	words.Only = nil
	settings, err := SettingsOf(p, words)
	if err != nil {
		return meta.VolumeInfo{}, err
	}
	return volumeInfo(c.Volumes.CreateVolume(ctx, &CreateVolumeRequest{Name: name, Settings: settings}))
}

// SetVolume changes a volume's settings: the policy words named in words.Only (nil: all policy
// words), and the further words that are set. Errors: as of the API's SetVolume.
func (c *Client) SetVolume(ctx context.Context, id meta.VolumeID, p meta.Policy, words meta.VolumeWords) (meta.VolumeInfo, error) {
	settings, err := SettingsOf(p, words)
	if err != nil {
		return meta.VolumeInfo{}, err
	}
	return volumeInfo(c.Volumes.SetVolume(ctx, &SetVolumeRequest{Volume: Numbered(id), Settings: settings}))
}

// Walker follows paths of the tree, as a session of meta/client does: at is a path from the root
// volume to a directory; with mkdir, Walk makes missing directories.
type Walker interface {
	Walk(ctx context.Context, at string, mkdir bool) (meta.VolumeID, meta.Ino, error)
}

// AttachVolume attaches a volume at a path of the tree; with parents it makes missing
// directories above the path. Errors: as of the API's AttachVolume and of Walk.
func (c *Client) AttachVolume(ctx context.Context, tree Walker, id meta.VolumeID, at string, parents bool) (meta.VolumeInfo, error) {
	at = path.Clean("/" + at)
	if at == "/" {
		return meta.VolumeInfo{}, meta.E("attach", meta.Invalid, at, errors.New("the root volume is there"))
	}
	parent, dir, err := tree.Walk(ctx, path.Dir(at), parents)
	if err != nil {
		return meta.VolumeInfo{}, err
	}
	return volumeInfo(c.Volumes.AttachVolume(ctx, &AttachVolumeRequest{Volume: Numbered(id), Parent: Numbered(parent), Directory: uint64(dir), Name: []byte(path.Base(at))}))
}

// UndeleteVolume takes a volume out of the trash: by number or, if id is 0, the volume of the
// name that was deleted last. as is the new name; empty keeps the old name. Errors: as of the
// API's UndeleteVolume.
func (c *Client) UndeleteVolume(ctx context.Context, id meta.VolumeID, name, as string) (meta.VolumeInfo, error) {
	ref := Named(name)
	if id != 0 {
		ref = Numbered(id)
	}
	return volumeInfo(c.Volumes.UndeleteVolume(ctx, &UndeleteVolumeRequest{Volume: ref, Name: as}))
}

// DeleteVolume deletes a volume; now: past the trash. Errors: as of the API's DeleteVolume.
func (c *Client) DeleteVolume(ctx context.Context, id meta.VolumeID, now bool) error {
	_, err := c.Volumes.DeleteVolume(ctx, &DeleteVolumeRequest{Volume: Numbered(id), Now: now})
	return err
}

// DiscardVolume deletes a volume past the trash, if the volume has the name at that moment.
// Errors: as of the API's DeleteVolume.
func (c *Client) DiscardVolume(ctx context.Context, id meta.VolumeID, name string) error {
	_, err := c.Volumes.DeleteVolume(ctx, &DeleteVolumeRequest{Volume: Numbered(id), Now: true, Name: name})
	return err
}

// RenameVolume gives a volume another name. Errors: as of the API's RenameVolume.
func (c *Client) RenameVolume(ctx context.Context, id meta.VolumeID, name string) (meta.VolumeInfo, error) {
	return volumeInfo(c.Volumes.RenameVolume(ctx, &RenameVolumeRequest{Volume: Numbered(id), Name: name}))
}

// DetachVolume takes a volume out of the tree. Errors: as of the API's DetachVolume.
func (c *Client) DetachVolume(ctx context.Context, id meta.VolumeID) error {
	_, err := c.Volumes.DetachVolume(ctx, &DetachVolumeRequest{Volume: Numbered(id)})
	return err
}

func volumeInfo(x *Volume, err error) (meta.VolumeInfo, error) {
	if err != nil {
		return meta.VolumeInfo{}, err
	}
	return x.Info(), nil
}
