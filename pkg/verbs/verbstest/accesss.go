package verbstest

var accessTests []conformanceTest
