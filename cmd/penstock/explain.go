package main

import (
	"errors"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
)

// advice says what a user can do about an error of a kind. Kinds with a sufficient error text
// have no advice.
var advice = map[meta.Kind]string{
	meta.DirectoryInUse: "another penstock process holds this data directory; stop it, or choose another with --dir",
	meta.Version:        "this data was written by another version of penstock; run the version that wrote it, or a newer one",
	meta.Corrupt:        "run 'penstock fsck' on the data directory; do not delete anything before you know what is damaged",
	meta.Unavailable:    "try again; 'penstock health' says what is missing",
	meta.NoSuchVolume:   "see 'penstock volume list'",
	meta.VolumeExists:   "choose another name, or see 'penstock volume show'",
	meta.NoSpace:        "free space on the disk of the data directory; penstock goes on by itself",
}

// wrongDigest is the advice for intact bytes with another digest than the requested digest.
const wrongDigest = "the snapshot is readable, but its digest differs from the demanded digest: compare the demanded digest with 'penstock snapshot show',\n" +
	"  and with 'penstock digest DIRECTORY' of the original; 'penstock snapshot diff' lists the changes since an earlier snapshot"

// explain renders an error for people: the failure, the object, and the advice.
func explain(err error) string {
	s := err.Error()
	a, ok := advice[meta.KindOf(err)]
	if _, wrong := errors.AsType[*penstock.WrongDigestError](err); wrong {
		a, ok = wrongDigest, true
	}
	if advised, is := errors.AsType[*advisedError](err); is {
		a, ok = advised.advice, true
	}
	if ok {
		s += "\n  " + a
	}
	return s
}
