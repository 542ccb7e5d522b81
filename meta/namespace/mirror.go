package namespace

import (
	"encoding/binary"

	"penstock.io/penstock/meta"
)

//
// The target of a mirror has a record with the readers' snapshot. The record belongs to no
// generation.

var mirrorKey = []byte{prefixMirror}

func (t *tx) setMirror(op *meta.SetMirror) error {
	if op.Shown == 0 {
		if _, have, err := t.r.Get(mirrorKey); err != nil || !have {
			return err
		}
		s := t.mark()
		t.buf = append(t.buf, mirrorKey...)
		t.deleteAt(s)
		return nil
	}
	if _, err := t.snaps().snapshotAt(uint32(op.Shown)); err != nil {
		return err
	}
	s := t.mark()
	t.buf = append(t.buf, mirrorKey...)
	v := len(t.buf)
	t.buf = appendMirror(t.buf, op.Shown)
	t.putAt(s, v)
	return nil
}

// notShown refuses the deletion of the snapshot that a mirror's readers see.
func (t *tx) notShown(sn *snapshot) error {
	shown, err := Mirror(t.r)
	if err == nil && shown == meta.Generation(sn.gen) {
		err = fail("delete snapshot", meta.Busy, sn.name+": the readers of the mirror see it")
	}
	return err
}

// Mirror returns the generation of the snapshot that a mirror's readers see; zero for any
// volume but a mirror's target.
func Mirror(r Reader) (meta.Generation, error) {
	b, have, err := r.Get(mirrorKey)
	if err != nil || !have {
		return 0, err
	}
	return decodeMirror(b)
}

func decodeMirror(b []byte) (meta.Generation, error) {
	d := decoder{b: b}
	if err := d.version(mirrorV1, "mirror"); err != nil {
		return 0, err
	}
	g := d.fixed32()
	if g == 0 {
		d.bad = true
	}
	return meta.Generation(g), d.end("mirror")
}

func appendMirror(b []byte, shown meta.Generation) []byte {
	return binary.BigEndian.AppendUint32(append(b, mirrorV1), uint32(shown))
}
